"""Probers side by side, each in a place of its own: what a search hands its probes to when several run at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.probe.executors.local import LocalExecutor
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.techniques import keeps_on_host


class PoolExecutor:
    """As many zygotes as places. Its methods may be called in as many threads. A context manager; leaving it ends all.

    Args:
        log_directory, timeout: as of a `LocalExecutor`.
    """

    def __init__(self, places: Sequence[Place], log_directory: Path, timeout: float) -> None:
        self.places = tuple(places)
        self._free: queue.SimpleQueue[LocalExecutor] = queue.SimpleQueue()
        self._host = threading.Lock()
        with contextlib.ExitStack() as started:
            self._executors = [
                started.enter_context(LocalExecutor(log_directory, timeout, place)) for place in self.places
            ]
            started.pop_all()
        for executor in self._executors:
            self._free.put(executor)

    def __enter__(self) -> PoolExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every zygote and its child; whoever waits for one gets a ProbeError. Safe to call twice."""
        for executor in self._executors:
            executor.hang_up()
        for executor in self._executors:
            executor.close()

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        """Measure one Config by whichever worker is free; raises as `LocalExecutor.measure` does.

        Configs that keep part of the training on the host are measured one at a time: each may take all of the host's
        budget, and they would share its memory's bandwidth and, where they step there, its cores.
        """
        alone = self._host if keeps_on_host(request.config) else contextlib.nullcontext()
        with alone, self._taken() as executor:
            return executor.measure(workload, request, number=number)

    def run(self, function: Callable[..., Any], workload: Workload, *arguments: Any, log: str, timeout: float) -> Any:
        """What `LocalExecutor.run` of whichever worker is free returns."""
        with self._taken() as executor:
            return executor.run(function, workload, *arguments, log=log, timeout=timeout)

    @contextlib.contextmanager
    def _taken(self) -> Iterator[LocalExecutor]:
        executor = self._free.get()
        try:
            yield executor
        finally:
            self._free.put(executor)
