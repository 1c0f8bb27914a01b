"""Messages between the parent, the zygote and its children, sent whole by `multiprocessing.connection`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Work for a child: `payload` is a pickle of (function, arguments), opened in the child only."""

    payload: bytes
    log: str
    timeout: float


@dataclass(frozen=True)
class Returned:
    """The child's answer, a pickle of what the function returned."""

    payload: bytes


@dataclass(frozen=True)
class Died:
    """The child ended without an answer: killed by `signal`, or with exit code `code`."""

    signal: int | None
    code: int | None


@dataclass(frozen=True)
class TimedOut:
    """The child was killed because its time was up."""


@dataclass(frozen=True)
class Ready:
    """The zygote has imported what it preloads."""
