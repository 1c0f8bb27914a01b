"""Probes at the same time: each in a thread of its own, started and awaited by the search's thread.
Only that thread touches what the search knows."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from autofit.core.config import Config
from autofit.core.measurement import Measurement

_MOST_PLACES = 256  # threads; one is made when it is needed first

# Gets a number, a config, and the best's seconds per step; gives None where time was up before.
Probe = Callable[[int, Config, float | None], Measurement | None]


class Concurrency(Protocol):
    """At most `places` probes at a time, each known by its number."""

    @property
    def places(self) -> int: ...

    def submit(
        self,
        number: int,
        config: Config,
        best_seconds: float | None,
    ) -> None:
        """Start to measure a config; fewer than `places` are being measured.

        Args:
            number: by which `wait` knows it.
            best_seconds: per step of the best so far, to stop hopeless probes.
        """

    def wait(self) -> tuple[int, Measurement | None]:
        """The next probe to finish, or what it raised; at least one is being measured."""

    def shutdown(self) -> list[tuple[int, Measurement | None]]:
        """Stop the probes that still run; returns those that had finished before."""


class Threaded:
    """Probes in threads; also one alone, so that Ctrl-C finds the search waiting and not halfway
    through a message.

    Args:
        room: how many places there are now.
        give_up: makes every call of `probe` that has not returned return or raise soon.
    """

    def __init__(
        self,
        probe: Probe,
        room: Callable[[], int] = lambda: 1,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self._room = room
        self._give_up = give_up
        self._pool = ThreadPoolExecutor(_MOST_PLACES, thread_name_prefix="autofit-probe")
        self._running: dict[Future[Measurement | None], int] = {}  # in the order of their start

    @property
    def places(self) -> int:
        return min(self._room(), _MOST_PLACES)

    def submit(
        self,
        number: int,
        config: Config,
        best_seconds: float | None,
    ) -> None:
        future = self._pool.submit(self._probe, number, config, best_seconds)
        self._running[future] = number

    def wait(self) -> tuple[int, Measurement | None]:
        done = wait(self._running, return_when=FIRST_COMPLETED).done
        first = next(future for future in self._running if future in done)
        return self._running.pop(first), first.result()

    def shutdown(self) -> list[tuple[int, Measurement | None]]:
        finished = []
        for future, number in self._running.items():
            if future.done() and not future.exception():
                finished.append((number, future.result()))

        if self._running:
            self._give_up()

        self._pool.shutdown(cancel_futures=True)
        return finished
