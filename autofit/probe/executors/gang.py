"""The executor of one training on several devices: a zygote for each, whose children join one
process group.

A probe ends by its cause. The first rank that does not succeed ends all: the others have a second
to say what they saw, and are ended then, so that nothing waits for a watchdog. The outcome is
decided by the rank whose own error it was.
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
from functools import partial
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
from autofit.distributed.group import Failure, first_cause, stuck
from autofit.probe.executors import Executor, Work
from autofit.probe.executors.local import (
    LATE_SECONDS,
    Call,
    LocalExecutor,
    Worker,
    how_it_ended,
    timeout_of_probe,
)
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

_GRACE = 1.0  # seconds for the other ranks to say what they saw
LINK_SECONDS = 120.0  # to measure a link, which takes one or two where it works

Answers = dict[int, Any]  # by rank: what a function returned, or an Ended


class RanksExecutor(Executor):
    """Workers of one rank each, all of which measure one Config together; `timeout` as theirs.

    Rank 0 writes to `NNNN.log`, the others to `NNNN-rank-R.log`. Other functions run where rank 0
    is.
    """

    def __init__(self, workers: Sequence[Worker], timeout: float) -> None:
        self.devices = len(workers)
        self.timeout = timeout
        self._probes = 0
        self._turn = threading.Lock()
        self._workers = workers

    @abstractmethod
    def meeting(self) -> tuple[str, str | None]:
        """Where the ranks of one call meet, in PyTorch's words, and a file to delete afterwards."""

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
        timeout = timeout_of_probe(self.timeout, request, is_first=not self._probes)
        start = time.monotonic()
        self._probes += 1
        hardware = request.hardware
        request = dataclasses.replace(request, budget=request.budget.of_each(hardware.devices))

        with self._turn:
            answers = self._together(measure_on_rank, workload, request, f"{number:04d}", timeout)
            seconds = time.monotonic() - start
            rank, measurement = _combined(answers, request, timeout, self.devices)
            if measurement.outcome is Outcome.OUT_OF_MEMORY and hardware.device == "cuda":
                self._workers[rank].run(
                    check_free_memory,
                    None,
                    request.budget,
                    hardware,
                    log="look.log",
                    timeout=timeout,
                    task="looking at the card",
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
        record = partial(trace_on_rank, directory=directory)
        answers = self.traced(record, workload, Request(config, hardware, budget, Plan()))
        paths: dict[str, str] = answers[0]
        return paths

    def traced(self, record: Work, workload: Workload, request: Request) -> Answers:
        """The mappings that `record` returned of a step on each rank.

        Raises ProbeError where a rank returned none.
        """
        with self._turn:
            timeout = self.seconds_within(self.timeout)
            answers = self._together(record, workload, request, "step-trace", timeout)

        for rank in range(self.devices):
            if not isinstance(answers.get(rank), dict):
                raise ProbeError(
                    f"rank {rank} of {self.devices} did not end its step.", "See step-trace.log."
                )
        return answers

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        request = Request(Config({}), hardware, budget, Plan())
        with self._turn:
            timeout = self.seconds_within(LINK_SECONDS)
            answers = self._together(link_of_rank, None, request, "link", timeout)

        answer = answers.get(0)
        return answer if isinstance(answer, Link) else None

    def _together(
        self, function: Work, workload: Workload | None, request: Request, log: str, timeout: float
    ) -> Answers:
        """What `function(workload, request, place, timeout)` returned on each rank, or how that
        ended; the ranks left out were ended."""
        store, scratch = self.meeting()
        answers: Answers = {}
        running: dict[int, Worker] = {}
        try:
            for rank, worker in enumerate(self._workers):
                arguments = request, *self._place(rank, request.hardware, store, timeout)
                name = f"{log}-rank-{rank}.log" if rank else f"{log}.log"
                worker.start(Call(function, workload, arguments, name, timeout, scratch))
                running[rank] = worker

            deadline = time.monotonic() + timeout + LATE_SECONDS
            while running:
                connections = [worker.connection for worker in running.values()]
                ready = wait(connections, max(0.0, deadline - time.monotonic()))
                if not ready:
                    break

                for rank, worker in tuple(running.items()):
                    if worker.connection in ready:
                        del running[rank]
                        answers[rank] = worker.finish(timeout)
                        if not _worked(answers[rank]):
                            deadline = min(deadline, time.monotonic() + _GRACE)
        finally:
            # A zygote may have ended itself, which the next probe says.
            with contextlib.suppress(ProbeError):
                for worker in running.values():
                    worker.stop()
                for worker in running.values():
                    worker.finish(LATE_SECONDS)
        return answers

    def _place(
        self, rank: int, hardware: Hardware, store: str, timeout: float
    ) -> tuple[place.Place, float]:
        """A rank's place, and the seconds that it waits for another in a collective."""
        if hardware.device == "cpu":
            here = hardware.devices
            # A third of the time: gloo then tells in time where it waited.
            return place.Place(rank, self.devices, rank % here, here, store), timeout / 3
        # Of the cards, each rank sees its own alone. NCCL's watchdog would tell nothing.
        return place.Place(rank, self.devices, 0, 1, store), 2 * timeout


class GangExecutor(RanksExecutor):
    """A LocalExecutor in each of several places; `log_directory` and `timeout` as there."""

    def __init__(self, places: Sequence[Place], log_directory: Path, timeout: float) -> None:
        workers = []
        with contextlib.ExitStack() as started:
            for place in places:
                worker = LocalExecutor(log_directory, timeout, place)
                workers.append(started.enter_context(worker))
            started.pop_all()
        super().__init__(workers, timeout)
        self._stores: list[Path] = []

    def close(self) -> None:
        super().close()
        for store in self._stores:  # which a zygote that hung or was killed did not delete
            store.unlink(missing_ok=True)

    def meeting(self) -> tuple[str, str | None]:
        store = Path(tempfile.gettempdir(), f"autofit-ranks-{os.getpid()}-{uuid.uuid4().hex}")
        # What cleans temporary files may have removed the folder meanwhile.
        store.parent.mkdir(parents=True, exist_ok=True)
        self._stores.append(store)
        return f"file://{store}", str(store)


def _worked(answer: Any) -> bool:
    if isinstance(answer, RankAnswer):
        return answer.measurement.fits
    return not isinstance(answer, Ended)


def _combined(
    answers: Answers, request: Request, timeout: float, count: int
) -> tuple[int, Measurement]:
    """The merged measurement, and the rank that caused the failure; rank 0 where all fit."""
    measured: dict[int, Measurement] = {}
    failures: list[Failure] = []
    peak: PeakBytes | None = None
    warnings: dict[str, None] = {}
    for rank, answer in answers.items():
        if not isinstance(answer, RankAnswer):
            continue
        measurement = answer.measurement
        measured[rank] = measurement
        warnings |= dict.fromkeys(measurement.warnings)
        if answer.failure:
            failures.append(answer.failure)
        if measurement.peak_bytes:
            peak = peak.larger(measurement.peak_bytes) if peak else measurement.peak_bytes

    if len(measured) == count and all(found.fits for found in measured.values()):
        cause = 0
        outcome = Outcome.FITS
        reason = next(iter(measured.values())).reason
    else:
        cause, outcome, reason = _cause(answers, measured, failures, timeout, count)

    found = measured.get(cause) or Measurement(request.config, outcome)
    return cause, dataclasses.replace(
        found, outcome=outcome, reason=reason, peak_bytes=peak, warnings=tuple(warnings)
    )


def _cause(
    answers: Answers,
    measured: dict[int, Measurement],
    failures: list[Failure],
    timeout: float,
    count: int,
) -> tuple[int, Outcome, str | None]:
    """The rank that did not do its part, its outcome and reason.

    Memory that ran out anywhere comes first.
    """

    def of(rank: int) -> tuple[int, Outcome, str]:
        outcome = measured[rank].outcome
        reason = measured[rank].reason or ""
        if outcome in (Outcome.REFUSED, Outcome.DIVERGED):  # alike on all ranks
            return rank, outcome, reason
        return rank, outcome, f"rank {rank} of {count}: {reason}"

    def held_bytes(rank: int) -> int:
        peak = measured[rank].peak_bytes
        return peak.held_bytes if peak else 0

    for outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY):
        short = [rank for rank, found in measured.items() if found.outcome is outcome]
        if short:
            return of(max(short, key=held_bytes))

    died = {
        rank: answer
        for rank, answer in answers.items()
        if isinstance(answer, Ended) and answer.code is not None
    }
    cause = first_cause(failures, died)
    if isinstance(cause, int):
        outcome, reason = how_it_ended(died[cause], timeout)
        return cause, outcome, f"rank {cause} of {count}: {reason}"
    if cause is not None:
        return of(cause.rank)

    if not failures:
        return 0, *how_it_ended(Ended(b"", None), timeout)
    outcome = Outcome.TIMED_OUT if len(failures) < count else Outcome.FAILED
    return 0, outcome, stuck(failures, count).message
