"""The executor of a Ray cluster: a probe runs in a gang of ranks, in as many gangs as there is room
for, and is done again elsewhere where its node is lost.

The search and all that it keeps stay where it was called.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import ProbeError
from autofit.core.hardware import Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.probe.executors import Executor, Work
from autofit.probe.executors.cluster import Cluster, Gang
from autofit.probe.executors.far import LostError
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.techniques import keeps_on_host

_LOSSES = 3  # of nodes under one probe, until that is its own fault

Answer = TypeVar("Answer")


class RayExecutor(Executor):
    """Gangs of `options.devices` x `options.nodes` ranks on a cluster: that at RAY_ADDRESS, the one
    around, or one that is started here.

    Args:
        until: the time, of time.monotonic(), to wait for room there.
        within: the cluster of another executor, which closes it.

    Raises as `Cluster`.
    """

    def __init__(
        self,
        options: SearchOptions,
        log_directory: Path,
        notify: Callable[[str], None] = lambda _: None,
        until: float = math.inf,
        *,
        within: Cluster | None = None,
    ) -> None:
        self._given = options, log_directory, notify, until
        self._notify = notify
        self.timeout = options.probe_timeout
        self._shared = within is not None
        self._cluster = within or Cluster(*self._given)

        self.devices = self._cluster.world
        self.places = self._cluster.free_slots()
        self.sharing = self._cluster.sharing
        cores = self._cluster.processors
        self.own_ranks = ()
        if self.devices > 1:
            self.own_ranks = tuple(Place(rank, cores=cores) for rank in range(self.devices))

        self._taken: set[Gang] = set()
        self._host = threading.Lock()
        self._asking = 0  # callers that wait for an answer, or for room
        self._changed = threading.Condition()
        self._given_up = threading.Event()

    def free_slots(self) -> int:
        return self._cluster.free_slots()

    def describe(self) -> str:
        """A sentence on where probes run."""
        return self._cluster.describe()

    @contextlib.contextmanager
    def explorer(self) -> Iterator[Executor]:
        with RayExecutor(*self._given, within=self._cluster) as explorer:
            explorer.end_by(self.until)
            yield explorer
        self._cluster.end_idle(but=1)  # finalists run one at a time: others may have the rest

    def give_up(self) -> None:
        self._given_up.set()
        with self._changed:
            for gang in self._taken:
                gang.executor.give_up()

    def close(self) -> None:
        self.give_up()
        with self._changed:
            self._changed.wait_for(lambda: not self._asking)
        if not self._shared:
            self._cluster.close()

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        """As `Executor.measure`.

        Where gangs share nodes, what keeps part of the training on the host is measured one at a
        time, as by a PoolExecutor.
        """
        alone = keeps_on_host(request.config) and self._cluster.shares_nodes
        try:
            with self._host if alone else contextlib.nullcontext():
                return self._anywhere(
                    lambda executor: executor.measure(workload, request, number=number)
                )
        except LostError:
            reason = (
                f"was lost with its node {_LOSSES} times, as where it takes all of a node's memory"
            )
            return Measurement(request.config, Outcome.FAILED, number, reason=reason)

    def run(
        self,
        function: Work,
        workload: Workload | None,
        *arguments: Any,
        log: str,
        timeout: float,
        task: str = "it",
    ) -> Any:
        return self._anywhere(
            lambda executor: executor.run(
                function, workload, *arguments, log=log, timeout=timeout, task=task
            )
        )

    def trace(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        budget: Budget,
        *,
        directory: Path,
    ) -> dict[str, str]:
        return self._anywhere(
            lambda executor: executor.trace(workload, config, hardware, budget, directory=directory)
        )

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        return self._anywhere(lambda executor: executor.link(hardware, budget))

    def _anywhere(self, ask: Callable[[Executor], Answer]) -> Answer:
        """What a gang answers; another one is asked where it is lost."""
        with self._changed:
            self._asking += 1

        try:
            for left in reversed(range(_LOSSES)):
                try:
                    with self._gang() as gang:
                        gang.executor.end_by(self.until)
                        return ask(gang.executor)
                except LostError as lost:
                    if self._given_up.is_set():
                        raise ProbeError(lost.message, lost.remedy) from lost
                    if not left:
                        raise
                    self._notify(f"{lost.message} What ran there is done again elsewhere.")
            raise AssertionError("the last one is raised")
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _gang(self) -> Iterator[Gang]:
        gang = self._cluster.take(self._given_up)
        with self._changed:
            self._taken.add(gang)

        is_whole = False
        try:
            if self._given_up.is_set():  # meanwhile
                raise ProbeError("probes were given up.")
            yield gang
            is_whole = True
        except LostError:
            raise
        except Exception:  # of the function that ran there
            is_whole = True
            raise
        finally:
            if is_whole and not self._given_up.is_set():
                self._cluster.give_back(gang)
            else:
                self._cluster.end([gang])
            with self._changed:
                self._taken.discard(gang)
