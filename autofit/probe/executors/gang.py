"""The executor of one training on several devices: a zygote for each, whose children join one process group.

A probe ends by its cause. The first rank that does not succeed ends all: the others have a second to say what they saw,
and are ended then, so that nothing waits for a watchdog; whose own error it was decides the outcome.
"""

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial, reduce
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from autofit.core import place
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import ProbeError
from autofit.core.hardware import Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.core.workload import Workload
from autofit.distributed.group import first_cause, stuck
from autofit.probe.executors import Executor, Work
from autofit.probe.executors.local import LATE_SECONDS, Call, LocalExecutor, Worker, how_it_ended
from autofit.probe.measure import (
    RankAnswer,
    check_free_memory,
    link_of_rank,
    measure_on_rank,
    trace_on_rank,
)
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.probe.timing import Plan
from autofit.probe.zygote import Ended

_GRACE = 1.0
LINK_SECONDS = 120.0  # to measure a link, which takes one or two where it works

Answers = dict[int, Any]  # by rank: what a function returned, or an Ended


class RanksExecutor(Executor):
    """Workers of one rank each, all of which measure one Config together; `timeout` as theirs. Rank 0 writes to
    `NNNN.log`, the others to `NNNN-rank-R.log`. Other functions run where rank 0 is."""

    def __init__(self, workers: Sequence[Worker], timeout: float) -> None:
        self.devices, self.timeout = len(workers), timeout
        self._probes = 0
        self._turn = threading.Lock()
        self._workers = workers

    @abstractmethod
    def meeting(self) -> tuple[str, str | None]:
        """Where the ranks of one call meet, as PyTorch calls it, and a file to delete afterwards."""

    def end_by(self, until: float) -> None:
        super().end_by(until)
        for worker in self._workers:
            worker.end_by(until)

    def give_up(self) -> None:
        for worker in self._workers:
            worker.give_up()

    def close(self) -> None:
        self.give_up()
        with self._turn:
            for worker in self._workers:
                worker.close()

    def run(
        self,
        function: Work,
        workload: Workload | None,
        *arguments: Any,
        log: str,
        timeout: float,
        task: str = "it",
    ) -> Any:
        with self._turn:
            return self._workers[0].run(
                function, workload, *arguments, log=log, timeout=timeout, task=task
            )

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        timeout, start = (
            min(self.timeout * (1 if self._probes else 2), request.plan.seconds),
            time.monotonic(),
        )
        self._probes += 1
        request = dataclasses.replace(
            request, budget=request.budget.of_each(request.hardware.devices)
        )
        with self._turn:
            answers = self._together(measure_on_rank, workload, request, f"{number:04d}", timeout)
            seconds = time.monotonic() - start
            rank, measurement = _combined(answers, request, timeout, self.devices)
            if measurement.outcome is Outcome.OUT_OF_MEMORY and request.hardware.device == "cuda":
                look = check_free_memory, None, request.budget, request.hardware
                self._workers[rank].run(
                    *look, log="look.log", timeout=timeout, task="looking at the card"
                )
        return dataclasses.replace(measurement, number=number, seconds=seconds)

    def trace(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        budget: Budget,
        *,
        directory: Path,
    ) -> dict[str, str]:
        """As `Executor.trace`, of rank 0; the others' files are in `rank-R` beside them."""
        request = Request(config, hardware, budget, Plan())
        found: dict[str, str] = self.traced(
            partial(trace_on_rank, directory=directory), workload, request
        )[0]
        return found

    def traced(self, record: Work, workload: Workload, request: Request) -> Answers:
        """The mappings that `record` returned of a step on each rank; a ProbeError where one returned none."""
        with self._turn:
            answers = self._together(
                record, workload, request, "step-trace", self.seconds_within(self.timeout)
            )
        ended = [rank for rank in range(self.devices) if not isinstance(answers.get(rank), dict)]
        if ended:
            raise ProbeError(
                f"rank {ended[0]} of {self.devices} did not end its step.", "See step-trace.log."
            )
        return answers

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        request = Request(Config({}), hardware, budget, Plan())
        with self._turn:
            answers = self._together(
                link_of_rank, None, request, "link", self.seconds_within(LINK_SECONDS)
            )
        return answers[0] if isinstance(answers.get(0), Link) else None

    def _together(
        self, function: Work, workload: Workload | None, request: Request, log: str, timeout: float
    ) -> Answers:
        """What `function(workload, request, place, timeout)` returned on each rank, or how that ended; the ranks left
        out were ended."""
        store, scratch = self.meeting()
        each_node = request.hardware.devices
        sees_all = request.hardware.device == "cpu"  # of the cards, each rank sees its own
        answers: Answers = {}
        running: dict[int, Worker] = {}
        try:
            for rank, worker in enumerate(self._workers):
                local = (rank % each_node, each_node) if sees_all else (0, 1)
                rank_place = place.Place(rank, self.devices, *local, store)
                # gloo tells in time where it waited; NCCL's watchdog would tell nothing.
                arguments = request, rank_place, timeout / 3 if sees_all else 2 * timeout
                name = f"{log}-rank-{rank}.log" if rank else f"{log}.log"
                worker.start(Call(function, workload, arguments, name, timeout, scratch))
                running[rank] = worker
            deadline = time.monotonic() + timeout + LATE_SECONDS
            while running and (
                ready := wait(
                    [each.connection for each in running.values()],
                    max(0.0, deadline - time.monotonic()),
                )
            ):
                for rank in [
                    rank for rank, worker in running.items() if worker.connection in ready
                ]:
                    answers[rank] = running.pop(rank).finish(timeout)
                    if not _worked(answers[rank]):
                        deadline = min(deadline, time.monotonic() + _GRACE)
        finally:
            # of a zygote that has ended itself, which the next probe is told
            with contextlib.suppress(ProbeError):
                for worker in running.values():
                    worker.stop()
                for worker in running.values():
                    worker.finish(LATE_SECONDS)
        return answers


class GangExecutor(RanksExecutor):
    """A LocalExecutor in each of several places; `log_directory` and `timeout` as there."""

    def __init__(self, places: Sequence[Place], log_directory: Path, timeout: float) -> None:
        with contextlib.ExitStack() as started:
            workers = [
                started.enter_context(LocalExecutor(log_directory, timeout, place))
                for place in places
            ]
            started.pop_all()
        super().__init__(workers, timeout)
        self._stores: list[Path] = []

    def close(self) -> None:
        super().close()
        for store in self._stores:  # which a zygote that hung or was killed did not delete
            store.unlink(missing_ok=True)

    def meeting(self) -> tuple[str, str | None]:
        store = Path(tempfile.gettempdir(), f"autofit-ranks-{os.getpid()}-{uuid.uuid4().hex}")
        # what cleans temporary files may have taken it meanwhile
        store.parent.mkdir(parents=True, exist_ok=True)
        self._stores.append(store)
        return f"file://{store}", str(store)


def _worked(answer: Any) -> bool:
    return (
        answer.measurement.fits if isinstance(answer, RankAnswer) else not isinstance(answer, Ended)
    )


def _combined(
    answers: Answers, request: Request, timeout: float, count: int
) -> tuple[int, Measurement]:
    """The measurement of all ranks, and the rank that it is of: where not all fit, the one whose fault that is."""
    told = {rank: answer for rank, answer in answers.items() if isinstance(answer, RankAnswer)}
    seen = [answer.measurement for answer in told.values()]
    peaks = [each.peak_bytes for each in seen if each.peak_bytes]
    warnings = tuple(dict.fromkeys(text for each in seen for text in each.warnings))
    rank, outcome, reason = 0, Outcome.FITS, seen[0].reason if seen else None
    if len(seen) < count or not all(each.fits for each in seen):
        rank, outcome, reason = _cause(answers, told, timeout, count)
    found = told[rank].measurement if rank in told else Measurement(request.config, outcome)
    peak = reduce(PeakBytes.larger, peaks) if peaks else None
    return rank, dataclasses.replace(
        found, outcome=outcome, reason=reason, peak_bytes=peak, warnings=warnings
    )


def _cause(
    answers: Answers, told: dict[int, RankAnswer], timeout: float, count: int
) -> tuple[int, Outcome, str | None]:
    """The rank that did not do its part, its outcome and reason; memory that ran out anywhere comes first."""

    def of(rank: int) -> tuple[int, Outcome, str]:
        measurement = told[rank].measurement
        outcome, reason = measurement.outcome, measurement.reason or ""
        alike = outcome in (Outcome.REFUSED, Outcome.DIVERGED)  # on all ranks
        return rank, outcome, reason if alike else f"rank {rank} of {count}: {reason}"

    for outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY):
        if short := [
            rank for rank, answer in told.items() if answer.measurement.outcome is outcome
        ]:
            return of(max(short, key=lambda rank: _held(told[rank].measurement)))
    failures = [answer.failure for answer in told.values() if answer.failure]
    ended = {rank: answer for rank, answer in answers.items() if isinstance(answer, Ended)}
    cause = first_cause(
        failures, [rank for rank, answer in ended.items() if answer.code is not None]
    )
    if isinstance(cause, int):
        outcome, reason = how_it_ended(ended[cause], timeout)
        return cause, outcome, f"rank {cause} of {count}: {reason}"
    if cause is not None:
        return of(cause.rank)
    if not failures:
        return 0, *how_it_ended(Ended(b"", None), timeout)
    return (
        0,
        Outcome.TIMED_OUT if len(failures) < count else Outcome.FAILED,
        stuck(failures, count).message,
    )


def _held(measurement: Measurement) -> int:
    return measurement.peak_bytes.held_bytes if measurement.peak_bytes else 0
