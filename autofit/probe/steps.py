"""The part of a probe that is the same on every device: build one Config, run real steps, report
what was measured.

Where several ranks are measured together, all decide alike: on the slowest one's times, and on
whether any is over budget.
"""

import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, OomSnapshot, Outcome, PeakBytes
from autofit.core.workload import Workload
from autofit.data.batch import sample_count, samples_of
from autofit.probe.timing import (
    COMPOSED_MICRO_BATCHES,
    Plan,
    Stepper,
    interval_of_median,
    slowed_by,
    time_steps,
)
from autofit.setup import Setup, Technique
from autofit.techniques import added_techniques, all_techniques
from autofit.training.build import build
from autofit.training.memory_attribution import MemoryAttribution
from autofit.training.step import accumulate, train_step, update

_TREND = 0.05  # a smaller slowdown within a probe is not worth a warning
_WARM_STEPS = 2  # optimizer state exists only after the first
_MOST_SKIPPED = 50
_FEW_SAMPLES = 2


@dataclass(frozen=True)
class Request:
    """Everything a child needs to measure one Config of a workload."""

    config: Config
    hardware: Hardware
    budget: Budget
    plan: Plan
    techniques: tuple[Technique, ...] = field(default_factory=lambda: tuple(added_techniques()))


def peak_resident_bytes() -> int:
    """The largest resident set of this process since it was forked."""
    # Not VmHWM of /proc/self/status, which gVisor's kernel does not report.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class LossDivergedError(Exception):
    """The loss is not finite."""


class Probe(ABC):
    """The steps of a probe that are the same on every device, and its measurements so far."""

    def __init__(self, workload: Workload, request: Request) -> None:
        hardware = request.hardware
        self.workload = workload
        self.request = request
        self.usable = request.budget.cap_bytes(hardware.device)  # the context included
        self.cap = request.budget.cap_bytes(hardware.device, hardware.context_bytes)  # of tensors
        self.setup: Setup | None = None
        self.batch: Any = None
        self.loss: float | None = None
        self.samples: list[float] = []
        self.hopeless = False
        self.composed = False
        self.attribution: MemoryAttribution | None = None
        self.shortage: OomSnapshot | None = None
        self.build_seconds = 0.0
        self.warmup_seconds = 0.0

        config = request.config
        every = all_techniques()
        self.compiles = any(technique.compiles(config[technique.name]) for technique in every)
        self.pages = any(technique.pages(config[technique.name]) for technique in every)
        self.compiled_before = self._compiled()

    def run(self) -> None:
        """Build, warm up with memory watched, then time."""
        with self.watched():
            setup = self.prepare()

        largest = setup.ranks.largest
        if any(largest(self.over_budget())):
            return

        stepper = self._stepper(setup)
        self.samples, self.hopeless = time_steps(
            stepper, self.request.plan, lambda: largest(time.monotonic())[0]
        )
        self.composed = stepper.composed

    def prepare(self) -> Setup:
        """Build and warm up: every step from then on is like any later one."""
        start = time.monotonic()
        self.setup = build(self.workload, self.request.config, self.request.hardware)
        self.build_seconds = time.monotonic() - start
        self.built()

        with self.attribution.watching_forwards() if self.attribution else nullcontext():
            return self._warm_up(self.setup, start)

    def _warm_up(self, setup: Setup, start: float) -> Setup:
        workload = self.workload
        # A rank's own part, as a DataLoader reads it.
        own_samples = workload.effective_batch_size // setup.ranks.layout.dp_degree
        self.batch = workload.batch(own_samples)

        # Two micro-batches: the second runs with gradients alive, so no later one needs more. Of a
        # pipeline as many more as are under way at once.
        enough = 2
        if setup.part is not None:
            enough += setup.part.count
        part = self.part(setup, enough)
        first = part
        if self.begins_small() and workload.traits and workload.traits.splits:
            few = min(_FEW_SAMPLES, sample_count(part, workload.split))
            first = samples_of(part, 0, few, workload.split)

        stepped = 0
        tried = 0
        # A scaler may skip the first steps until its scale is low enough.
        while stepped < _WARM_STEPS and tried < _MOST_SKIPPED:
            loss = accumulate(setup, part if stepped else first)
            self._check(loss)
            stepped += update(setup)
            del loss  # which a step holds until its end
            tried += 1

        if stepped < _WARM_STEPS:
            raise LossDivergedError(f"the loss scaler skipped {tried} steps: gradients overflow")

        self.warmed_up(setup)
        self.synchronize()
        self.warmup_seconds = time.monotonic() - start - self.build_seconds
        return setup

    def begins_small(self) -> bool:
        """Whether a few samples are enough for the first step, which only makes what later ones
        find."""
        return False

    def part(self, setup: Setup, micro_batches: int) -> Any:
        """The first few micro-batches of this rank's batch, as a view of it."""
        count = min(micro_batches, setup.config.gradient_accumulation_steps or 1)
        samples = count * setup.micro_batch_size
        return samples_of(self.batch, 0, samples, self.workload.split)

    def _stepper(self, setup: Setup) -> Stepper:
        """What runs a step, or enough of it to compose its time."""

        def whole() -> float:
            return self._seconds(setup, lambda: self._check(train_step(setup, self.batch)))

        accumulation = setup.config.gradient_accumulation_steps or 1
        # Of a pipeline no micro-batch takes a time of its own.
        if accumulation <= COMPOSED_MICRO_BATCHES or setup.part is not None:
            return Stepper(self.request.plan, whole, None)

        part = self.part(setup, COMPOSED_MICRO_BATCHES)
        factor = accumulation / COMPOSED_MICRO_BATCHES

        def by_parts() -> float:
            micro = self._seconds(setup, lambda: self._check(accumulate(setup, part)))
            return micro * factor + self._seconds(setup, lambda: update(setup))

        return Stepper(self.request.plan, whole, by_parts)

    def _seconds(self, setup: Setup, action: Callable[[], Any]) -> float:
        """Of the slowest rank; all have waited for one another before."""
        self.synchronize()
        start = time.perf_counter()
        compiled = self._compiled()

        action()
        self.synchronize()
        took = time.perf_counter() - start - (self._compiled() - compiled)
        return setup.ranks.largest(took)[0]

    def _compiled(self) -> float:
        """Seconds that torch.compile has taken in this process."""
        if not self.compiles:
            return 0.0
        seconds: float = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
        return seconds

    def _check(self, loss: torch.Tensor) -> None:
        self.loss = float(loss)
        if not math.isfinite(self.loss):
            raise LossDivergedError(f"the loss is {self.loss}")

    def verdict(self) -> tuple[Outcome, str | None]:
        """The outcome of a run that came to its end."""
        if self.over_budget():
            needed = self.peak().held_bytes / GIB
            return Outcome.OUT_OF_MEMORY, f"needs {needed:.2f} GiB of {self.usable / GIB:.2f}"
        if self.hopeless:
            return Outcome.FITS, "stopped after two steps: far slower than the best"
        return Outcome.FITS, None

    def measurement(self, outcome: Outcome, reason: str | None, seconds: float) -> Measurement:
        """Everything measured, as data."""
        workload = self.workload
        steps = None
        samples_per_second = None
        tokens_per_second = None
        if self.samples and outcome is Outcome.FITS:
            steps = interval_of_median(self.samples)
            samples_per_second = workload.effective_batch_size / steps.median
            if workload.unit == "tokens" and workload.sequence_length:
                tokens_per_second = samples_per_second * workload.sequence_length

        loss = self.loss
        if loss is not None and not math.isfinite(loss):
            loss = None

        warnings = list(self.setup.warnings) if self.setup else []
        slower = slowed_by(self.samples)
        if slower > _TREND:
            warnings.append(
                f"steps took {slower:.0%} longer at the end of the measurement than at its "
                "beginning."
            )

        return Measurement(
            config=self.request.config,
            outcome=outcome,
            step_seconds=steps,
            samples_per_second=samples_per_second,
            tokens_per_second=tokens_per_second,
            peak_bytes=self.peak(),
            loss=loss,
            reason=reason,
            seconds=seconds,
            build_seconds=self.build_seconds,
            warmup_seconds=self.warmup_seconds,
            compile_seconds=self._compiled() - self.compiled_before,
            steps=len(self.samples),
            composed=self.composed,
            shortage=self.shortage if outcome is Outcome.OUT_OF_MEMORY else None,
            warnings=tuple(warnings),
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch memory inside."""
        yield

    def synchronize(self) -> None:  # noqa: B027 - the CPU has nothing to wait for
        """Wait for the device."""

    def built(self) -> None:
        """Called when the training run is built."""
        live = self.live()
        # Where code is compiled, a hook would be compiled, too.
        if self.setup and live and not self.compiles:
            self.attribution = MemoryAttribution(self.setup, live)

    def live(self) -> Callable[[], int] | None:
        """What counts the bytes of all tensors, while they are watched."""
        return None

    def note_shortage(self, asked: int | None) -> None:
        """Note what holds memory as it runs out, unless that was noted before."""
        if self.attribution and self.shortage is None:
            self.shortage = self.attribution.snapshot(asked)

    def warmed_up(self, setup: Setup) -> None:  # noqa: B027
        """Called after the first steps."""

    def check_free_memory(self) -> None:  # noqa: B027
        """Raise a ProbeError unless the device had the budget free when it was opened.

        A CPU's budget is of tensors, whatever else the machine holds.
        """

    @abstractmethod
    def over_budget(self) -> bool:
        """Whether memory passed what the budget leaves."""

    @abstractmethod
    def peak(self) -> PeakBytes:
        """Peak memory so far."""
