"""One function on many values, on several cores at once: in processes forked from this one."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from autofit.core.forks import Answer, die_with_parent, ending_forks

Value = TypeVar("Value")
Map = Callable[[Iterable[Value]], list[Answer]]

_inherited: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def parallel_map(
    function: Callable[[Value], Answer],
    processes: int | None,
    notify: Callable[[], None] = lambda: None,
) -> Iterator[Map[Value, Answer]]:
    """A map of `function` over values, with the answers in their order; `notify` is called after each.

    With 1 of `processes` it runs in this one. More, or None for one per core, are forked from this one, which must then
    have no other threads, no opened device, and have run no backward. They inherit the function, so that it may hold
    anything; values and answers are pickled.
    """
    processes = processes or len(os.sched_getaffinity(0))

    def collected(answers: Iterable[Answer]) -> list[Answer]:
        found = []
        for answer in answers:
            found.append(answer)
            notify()
        return found

    if processes == 1:
        yield lambda values: collected(map(function, values))
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(function,)
    ) as pool:
        yield lambda values: collected(pool.map(_call, values))


def _begin(function: Callable[[Any], Any]) -> None:
    global _inherited
    _inherited = function
    die_with_parent()  # else it would wait for more work after its parent was killed
    # Before threads are joined, which a model's may never be; ProcessPoolExecutor has no hook of its own for its end.
    threading._register_atexit(os._exit, 0)  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # the threads of the process it was forked from do not exist here


def _call(value: Any) -> Any:
    assert _inherited is not None
    with ending_forks():
        return _inherited(value)
