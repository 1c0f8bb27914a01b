"""The executor of several probes at once on one machine: on a card each, a share of the cores, or
several of them."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.probe.executors import Executor
from autofit.probe.executors.gang import GangExecutor
from autofit.probe.executors.local import LocalExecutor
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.techniques import keeps_on_host


class PoolExecutor(Executor):
    """A LocalExecutor in each of several places, or a GangExecutor in each `devices` of them.

    `log_directory` and `timeout` as there.
    """

    def __init__(
        self, places: Sequence[Place], log_directory: Path, timeout: float, devices: int = 1
    ) -> None:
        self.places = len(places) // devices
        self.devices = devices
        self.timeout = timeout
        self._idle: queue.SimpleQueue[Executor] = queue.SimpleQueue()
        self._host = threading.Lock()

        self._workers: list[Executor] = []
        with contextlib.ExitStack() as started:
            for first in range(0, len(places), devices):
                own = places[first : first + devices]
                worker: Executor
                if devices > 1:
                    worker = GangExecutor(own, log_directory, timeout)
                else:
                    worker = LocalExecutor(log_directory, timeout, *own)
                self._workers.append(worker)
                started.enter_context(worker)
            started.pop_all()

        for worker in self._workers:
            self._idle.put(worker)

    def end_by(self, until: float) -> None:
        super().end_by(until)
        for worker in self._workers:
            worker.end_by(until)

    def give_up(self) -> None:
        for worker in self._workers:
            worker.give_up()

    def close(self) -> None:
        self.give_up()  # all at once, before the first is waited for
        for worker in self._workers:
            worker.close()

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        """As `Executor.measure`, by whichever worker is idle.

        Configs that keep part of the training on the host are measured one at a time: each may take
        all of the host's budget, and they would share its bandwidth and cores.
        """
        alone = self._host if keeps_on_host(request.config) else contextlib.nullcontext()
        with alone, self._worker() as worker:
            return worker.measure(workload, request, number=number)

    def run(self, *arguments: Any, **options: Any) -> Any:
        with self._worker() as worker:
            return worker.run(*arguments, **options)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Executor]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)
