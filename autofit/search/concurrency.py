"""Who measures for a search: itself, one probe after the other, or several at a time in threads of their own.

The search starts probes and waits for whichever ends first, always from its own thread: what it knows is never touched
by another one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from autofit.core.config import Config
from autofit.core.measurement import Measurement

Probe = Callable[[int, Config, float | None], Measurement]


class Crew(Protocol):
    """At most `size` probes at a time, each known by its number."""

    size: int

    def start(self, number: int, config: Config, best_seconds: float | None) -> None:
        """Begin to measure a config; fewer than `size` are being measured."""

    def wait(self) -> tuple[int, Measurement]:
        """The next that ends; at least one is being measured. Raises what its probe raised."""

    def end(self) -> list[tuple[int, Measurement]]:
        """Stop whatever is still measured; what came to its end before that."""


class Alone:
    """One probe at a time, in the thread that waits for it."""

    size = 1

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def start(self, number: int, config: Config, best_seconds: float | None) -> None:
        self._next = number, config, best_seconds

    def wait(self) -> tuple[int, Measurement]:
        return self._next[0], self._probe(*self._next)

    def end(self) -> list[tuple[int, Measurement]]:
        return []


class Threads:
    """Several probes at a time.

    Args:
        probe: is called in several threads.
        stop: makes every call of it that has not returned return or raise soon, and every later one.
    """

    def __init__(self, probe: Probe, size: int, stop: Callable[[], None]) -> None:
        self.size = size
        self._probe, self._stop = probe, stop
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="autofit-probe")
        self._running: dict[Future[Measurement], int] = {}  # in the order in which they were started

    def start(self, number: int, config: Config, best_seconds: float | None) -> None:
        self._running[self._pool.submit(self._probe, number, config, best_seconds)] = number

    def wait(self) -> tuple[int, Measurement]:
        done = wait(self._running, return_when=FIRST_COMPLETED).done
        first = next(each for each in self._running if each in done)
        return self._running.pop(first), first.result()

    def end(self) -> list[tuple[int, Measurement]]:
        done = [each for each in self._running if each.done() and not each.exception()]
        if self._running:
            self._stop()
        self._pool.shutdown(cancel_futures=True)
        return [(self._running[each], each.result()) for each in done]
