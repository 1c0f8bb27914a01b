"""Forked processes: how one answers, and how they end."""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

Answer = TypeVar("Answer")


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """Send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, sent)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """End copies of this process that a model's code forks inside and that return as well."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)


def forked(function: Callable[[], Answer]) -> Callable[[], Answer]:
    """Start a function in a forked process; returns a function that waits for its answer.

    Threads and devices of that process are its own. The function that is returned raises EOFError
    where the process ended without an answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    os.close(writer)

    def answer() -> Answer:
        with os.fdopen(reader, "rb") as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        return pickle.loads(found)  # type: ignore[no-any-return]

    return answer
