"""A function on items, one after the other, in processes that import only what it needs.

They are started anew, never forked: this process may have threads that hold locks.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from autofit.core.environment import importing_alike
from autofit.core.errors import ProbeError, sentence

_MOST_WORKERS = 16  # one process reads no faster than so many work
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def mapped(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    *,
    in_processes: bool,
) -> Iterator[Answer]:
    """The answers, in the order of the items; of which no more are read than there is work for.

    Raises what the function raises for the first item that it fails on.
    """
    if not in_processes:
        yield from map(function, items)
        return

    count = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    workers = [_Worker(function) for _ in range(count)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def ask(item: Item) -> Answer:
        worker = idle.get()
        try:
            answer: Answer = worker(item)
            return answer
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Future[Answer]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(ask, item))
                if len(waiting) > 2 * count:
                    yield waiting.popleft().result()

            while waiting:
                yield waiting.popleft().result()
        finally:
            for worker in workers:  # first, so that no thread waits for one
                worker.end()
            for future in waiting:
                future.cancel()


class _Worker:
    """A process that applies a function to what it is sent."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**importing_alike(), **_ENVIRONMENT},
        )
        self._function: Callable[[Any], Any] | None = function

    def __call__(self, item: Any) -> Any:
        assert self._process.stdin and self._process.stdout, "both are pipes"
        try:
            if self._function is not None:
                pickle.dump(self._function, self._process.stdin, protocol=5)
                self._function = None

            pickle.dump(item, self._process.stdin, protocol=5)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            raise ProbeError(
                f"a process that tokenises the data ended with {code}: {sentence(error)}.",
                "Perhaps memory ran out: see what the system says of it.",
            ) from error

        if isinstance(answer, BaseException):
            raise answer

        return answer

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both are pipes"
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was not sent yet


def _serve() -> None:
    """Answer what comes on stdin until it ends; whatever else is printed goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    items = sys.stdin.buffer
    try:
        function = pickle.load(items)
        while True:
            item = pickle.load(items)
            try:
                answer = function(item)
            except Exception as error:
                answer = error

            pickle.dump(answer, answers, protocol=5)
            answers.flush()
    except (EOFError, BrokenPipeError):
        return  # the parent ended


if __name__ == "__main__":
    _serve()
