"""One function on many values, on several cores at once: in processes that are forked from this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from autofit.core.environment import die_with_parent

Given = TypeVar("Given")
Found = TypeVar("Found")
Each = Callable[[Iterable[Given]], list[Found]]


@contextlib.contextmanager
def spread(function: Callable[[Given], Found], processes: int | None) -> Iterator[Each[Given, Found]]:
    """Gives what calls `function` on each of some values and returns the answers in their order.

    With more than one process the function is inherited, so that it may hold anything; values and answers are pickled.

    Args:
        processes: 1: here. More, or None for as many as this one has cores: forked from this one, which must then
            have no other threads, no opened device, and have run no backward.
    """
    processes = processes or len(os.sched_getaffinity(0))
    if processes == 1:
        yield lambda values: list(map(function, values))
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(function,)) as pool:
        yield lambda values: list(pool.map(_call, values))


def apart(function: Callable[[], Found]) -> Found:
    """What a function returns in a forked process of its own, whose threads this one does not get.

    Raises:
        EOFError: the process ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def tell() -> None:
        die_with_parent()
        writer.send(function())

    process = context.Process(target=tell)
    process.start()
    writer.close()  # so that there is an end to read
    try:
        found: Found = reader.recv()
        return found
    finally:
        process.join()


_inherited: Callable[[Any], Any] | None = None


def _begin(function: Callable[[Any], Any]) -> None:
    global _inherited
    _inherited = function
    die_with_parent()  # else it would wait for more to do when that was killed
    torch.set_num_threads(1)  # the threads of the process it was forked from are not there


def _call(value: Any) -> Any:
    assert _inherited is not None
    return _inherited(value)
