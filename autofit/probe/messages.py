"""Messages between the parent, the zygote and its children, sent whole by `multiprocessing.connection`.

The first is the zygote's None, once it has imported what it preloads.
"""

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
    """The child ended without an answer: with exit code `code`, or killed by signal `-code`."""

    code: int


@dataclass(frozen=True)
class TimedOut:
    """The child was killed because its time was up."""
