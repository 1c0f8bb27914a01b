"""When the command that runs began: its time limit counts from then, as imports take seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_began: ContextVar[float | None] = ContextVar("began", default=None)


@contextmanager
def counted_from_now() -> Iterator[None]:
    """What runs inside began now."""
    token = _began.set(time.monotonic())
    try:
        yield
    finally:
        _began.reset(token)


def began() -> float:
    """When the command began, on the monotonic clock in seconds; now, where no command runs."""
    known = _began.get()
    if known is None:
        return time.monotonic()
    return known
