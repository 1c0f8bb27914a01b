"""Probers side by side, each in a place of its own: what a search hands its probes to when several run at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.probe.executors.local import Prober
from autofit.probe.placement import Place
from autofit.probe.timing import Plan
from autofit.techniques import keeps_on_host


class Workers:
    """As many zygotes as places. Its methods may be called in as many threads. A context manager; leaving it ends all.

    Args:
        log_directory, timeout: as of a `Prober`.
    """

    def __init__(self, places: Sequence[Place], log_directory: Path, timeout: float) -> None:
        self.places = tuple(places)
        self._free: queue.SimpleQueue[Prober] = queue.SimpleQueue()
        self._host = threading.Lock()
        with contextlib.ExitStack() as started:
            self._probers = [started.enter_context(Prober(log_directory, timeout, place)) for place in self.places]
            started.pop_all()
        for prober in self._probers:
            self._free.put(prober)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every zygote and its child; whoever waits for one gets a ProbeError. Safe to call twice."""
        for prober in self._probers:
            prober.hang_up()
        for prober in self._probers:
            prober.close()

    def measure(
        self, workload: Workload, config: Config, hardware: Hardware, budget: Budget, *, plan: Plan, number: int
    ) -> Measurement:
        """Measure one Config by whichever worker is free; raises as `Prober.measure` does.

        Configs that keep part of the training on the host are measured one at a time: each may take all of the host's
        budget, and they would share its memory's bandwidth and, where they step there, its cores.
        """
        alone = self._host if keeps_on_host(config) else contextlib.nullcontext()
        with alone, self._taken() as prober:
            return prober.measure(workload, config, hardware, budget, plan=plan, number=number)

    def run(self, function: Callable[..., Any], workload: Workload, *arguments: Any, log: str, timeout: float) -> Any:
        """What `Prober.run` of whichever worker is free returns."""
        with self._taken() as prober:
            return prober.run(function, workload, *arguments, log=log, timeout=timeout)

    @contextlib.contextmanager
    def _taken(self) -> Iterator[Prober]:
        prober = self._free.get()
        try:
            yield prober
        finally:
            self._free.put(prober)
