"""Functions on many values, on several cores at once: in processes forked from this one."""

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

# In a forked process, the functions that it can call.
_inherited: tuple[Callable[[Any], Any], ...] = ()


class Workers:
    """Calls functions in processes that are forked at the first call, and then live on.

    What a process has imported, and what PyTorch remembers of the operators it has seen, is there
    for the next call. The functions are inherited, so that they may hold anything, as it was when
    the processes were forked; values and answers are pickled.

    Args:
        processes: 1: all is called in this process; None: one process per core. To be forked, this
            process must have no other threads, no opened device, and have run no backward.

    Attributes:
        functions: those that may be called. Where some were added, the next call forks other
            processes.
    """

    def __init__(self, processes: int | None, *functions: Callable[[Any], Any]) -> None:
        self.functions = list(functions)
        self._processes = processes or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None
        self._inherited = 0  # how many functions the processes know

    @property
    def are_forked(self) -> bool:
        """Whether other processes than this one are to call the functions."""
        return self._processes > 1

    def map(
        self,
        function: Callable[[Value], Answer],
        values: Iterable[Value],
        notify: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """The answers to values, in their order; `notify` is called after each."""
        answers: Iterable[Answer]
        if not self.are_forked:
            answers = map(function, values)
        else:
            number = self.functions.index(function)
            tasks = [(number, value) for value in values]
            answers = self._forked().map(_call, tasks) if tasks else ()

        found = []
        for answer in answers:
            found.append(answer)
            notify()

        return found

    def close(self) -> None:
        """End the processes; a later call forks others."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _forked(self) -> ProcessPoolExecutor:
        if self._inherited < len(self.functions):
            self.close()

        if self._pool is None:
            self._inherited = len(self.functions)
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(tuple(self.functions),),
            )

        return self._pool


@contextlib.contextmanager
def parallel_map(
    function: Callable[[Value], Answer], processes: int | None
) -> Iterator[Map[Value, Answer]]:
    """A map of one function over values, in `Workers` that end with the context."""
    workers = Workers(processes, function)
    try:
        yield lambda values: workers.map(function, values)
    finally:
        workers.close()


def _begin(functions: tuple[Callable[[Any], Any], ...]) -> None:
    global _inherited
    _inherited = functions
    die_with_parent()  # else it would wait for more work after its parent was killed
    # Before threads are joined, which a model's may never be; ProcessPoolExecutor has no hook of
    # its own for its end.
    threading._register_atexit(os._exit, 0)  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # the threads of the process it was forked from do not exist here


def _call(task: tuple[int, Any]) -> Any:
    number, value = task
    with ending_forks():
        return _inherited[number](value)
