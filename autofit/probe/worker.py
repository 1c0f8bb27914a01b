"""What a probe's child process does: build one Config, run real training steps, and say what it saw."""

from __future__ import annotations

import math
import os
import pickle
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, InputError, ProbeError, RefusedError
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.core.workload import Traits, Workload
from autofit.memory import segments
from autofit.memory.allocations import AllocationRecord
from autofit.memory.device import detect, used_bytes_without_context, visible_cards
from autofit.memory.out_of_memory import is_device_out_of_memory, is_host_out_of_memory
from autofit.memory.tracker import StorageTracker
from autofit.probe.limits import guard_cpu, peak_resident_bytes
from autofit.probe.timing import Plan, interval_of_median, slowed_by, time_steps
from autofit.setup import Setup, Technique
from autofit.techniques import all_techniques, register
from autofit.training.build import build
from autofit.training.data import map_tensors
from autofit.training.inspect import inspect_workload
from autofit.training.loop import accumulate, train_step, update

_TREND_TOLD = 0.05
COMPOSED_MICRO_BATCHES = 4
_WARM_STEPS = 2  # optimizer state exists only after the first
_IDLE = GIB  # of a card in use by others, such as a desktop: what computes takes more
_NEAR_MISS = 1.5  # a run over budget goes on up to here, so that the nearest miss can be told in bytes


@dataclass(frozen=True)
class Request:
    """Everything a child needs to measure one Config of a workload."""

    config: Config
    hardware: Hardware
    budget: Budget
    plan: Plan
    techniques: tuple[Technique, ...] = ()


class _DivergedError(Exception):
    """The loss is not finite."""


def serve(function: Callable[..., Any], workload: bytes, arguments: bytes) -> Any:
    """Open what the parent sent, here, where the user's modules are imported, and call `function` with it.

    Errors that are the user's to mend come back as values.
    """
    try:
        opened = pickle.loads(workload)
        rest = pickle.loads(arguments)
    except Exception as error:
        message = f"the workload cannot be opened in a probe process: {type(error).__name__}: {error}."
        remedy = "Define its functions in a module that can be imported, or in the notebook or script itself."
        return InputError(message, remedy)
    try:
        return function(opened, *rest)
    except AutofitError as error:
        return error


def look_around(_: Workload | None, device: str | None) -> Hardware:
    """The hardware alone."""
    return detect(device)


def look_for_cards(_: Workload | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls the cards that are visible."""
    return visible_cards()


def look_at_card(_: Workload | None, card: str) -> Hardware:
    """One of the visible cards; a ProbeError where others use it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    used = used_bytes_without_context()
    if used > _IDLE:
        raise ProbeError(f"others use {used / GIB:.1f} GiB of card {card}.")
    return detect("cuda")


def look(workload: Workload, device: str | None, budget_bytes: int | None) -> tuple[Hardware, Traits]:
    """The hardware, and the traits of the workload on it."""
    hardware = detect(device)
    return hardware, inspect_workload(workload, hardware, budget_bytes or hardware.host_free_bytes)


def measure(workload: Workload, request: Request) -> Measurement:
    """Measure one Config; every way a run can end comes back as an Outcome, never as an exception."""
    start = time.monotonic()
    for technique in request.techniques:
        register(technique)
    probe = probe_of(workload, request)
    outcome, reason = Outcome.FITS, None
    try:
        probe.run()
        outcome, reason = probe.verdict()
    except RefusedError as error:
        outcome, reason = Outcome.REFUSED, str(error)
    except _DivergedError as error:
        outcome, reason = Outcome.DIVERGED, str(error)
    except AutofitError as error:
        outcome, reason = Outcome.FAILED, str(error)
    except Exception as error:
        outcome, reason = _classify(error, request)
    return probe.measurement(outcome, reason, time.monotonic() - start)


def probe_of(workload: Workload, request: Request) -> Probe:
    """The probe of the device that was asked for; it puts this process under the cap."""
    return (_CudaProbe if request.hardware.device == "cuda" else _CpuProbe)(workload, request)


def _classify(error: Exception, request: Request) -> tuple[Outcome, str]:
    if is_device_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, f"needs more than {request.budget.device_bytes / GIB:.2f} GiB"
    if is_host_out_of_memory(error):
        if request.hardware.device == "cpu":
            return Outcome.OUT_OF_MEMORY, "ran into the resource limit that guards the machine"
        return Outcome.HOST_OUT_OF_MEMORY, "the host could not give more memory"
    traceback.print_exc()
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return Outcome.FAILED, "\n".join(lines[-12:])


class Probe(ABC):
    """The steps of a probe that are the same on every device, and what it has seen so far."""

    def __init__(self, workload: Workload, request: Request) -> None:
        self.workload = workload
        self.request = request
        self.cap = request.budget.cap_bytes(request.hardware.device, request.hardware.context_bytes)
        self.setup: Setup | None = None
        self.batch: Any = None
        self.loss: float | None = None
        self.samples: list[float] = []
        self.hopeless = False
        self.composed = False
        self.build_seconds = self.warmup_seconds = 0.0
        self.compiles = any(each.compiles(request.config[each.name]) for each in all_techniques())
        self.compiled_before = self._compiled()

    def run(self) -> None:
        """Build, warm up with memory watched, then time."""
        with self.watched():
            setup = self.prepare()
        if self.over_budget():
            return
        self.before_timing()
        self.samples, self.hopeless = time_steps(self._stepper(setup), self.request.plan, time.monotonic)

    def prepare(self) -> Setup:
        """Build, and warm up: what comes next is a step as any later one."""
        start = time.monotonic()
        self.setup = build(self.workload, self.request.config, self.request.hardware)
        self.build_seconds = time.monotonic() - start
        self.batch = self.workload.batch(self.workload.effective_batch_size)
        self._warm_up(self.setup)
        self.synchronize()
        self.warmup_seconds = time.monotonic() - start - self.build_seconds
        return self.setup

    def _warm_up(self, setup: Setup) -> None:
        """Steps of two micro-batches: the second runs with gradients alive, so no later one needs more memory."""
        part = self.part(setup, 2)
        stepped = tried = 0
        while stepped < _WARM_STEPS and tried < 50:  # a scaler may skip the first steps until its scale is low enough
            self._check(accumulate(setup, part))
            stepped += update(setup)
            tried += 1
        if stepped < _WARM_STEPS:
            raise _DivergedError(f"the loss scaler skipped {tried} steps: gradients overflow")

    def part(self, setup: Setup, micro_batches: int) -> Any:
        """The first few micro-batches of the effective batch, as a view of it."""
        samples = micro_batches * setup.micro_batch_size
        return map_tensors(self.batch, lambda tensor: tensor[:samples] if tensor.dim() else tensor)

    def _stepper(self, setup: Setup) -> Callable[[], float]:
        accumulation = int(setup.config["gradient_accumulation_steps"] or 1)
        if not self.request.plan.compose or accumulation <= COMPOSED_MICRO_BATCHES:
            return lambda: self._seconds(lambda: self._check(train_step(setup, self.batch)))
        self.composed = True
        part = self.part(setup, COMPOSED_MICRO_BATCHES)
        factor = accumulation / COMPOSED_MICRO_BATCHES

        def composed() -> float:
            micro = self._seconds(lambda: self._check(accumulate(setup, part)))
            return micro * factor + self._seconds(lambda: update(setup))

        return composed

    def _seconds(self, action: Callable[[], Any]) -> float:
        self.synchronize()
        start, compiled = time.perf_counter(), self._compiled()
        action()
        self.synchronize()
        return time.perf_counter() - start - (self._compiled() - compiled)

    def _compiled(self) -> float:
        """Seconds that torch.compile has taken in this process."""
        return torch._dynamo.utils.calculate_time_spent()["total_wall_time"] if self.compiles else 0.0

    def _check(self, loss: torch.Tensor) -> None:
        self.loss = float(loss)
        if not math.isfinite(self.loss):
            raise _DivergedError(f"the loss is {self.loss}")

    def verdict(self) -> tuple[Outcome, str | None]:
        """The outcome of a run that came to its end."""
        if self.over_budget():
            return Outcome.OUT_OF_MEMORY, f"needs {self.peak().allocated / GIB:.2f} GiB of {self.cap / GIB:.2f}"
        if self.hopeless:
            return Outcome.FITS, "stopped after two steps: far slower than the best"
        return Outcome.FITS, None

    def measurement(self, outcome: Outcome, reason: str | None, seconds: float) -> Measurement:
        """Everything seen, as data."""
        workload = self.workload
        steps = interval_of_median(self.samples) if self.samples and outcome is Outcome.FITS else None
        per_second = workload.effective_batch_size / steps.median if steps else None
        tokens = workload.sequence_length if workload.unit == "tokens" else None
        return Measurement(
            config=self.request.config,
            outcome=outcome,
            step_seconds=steps,
            samples_per_second=per_second,
            tokens_per_second=per_second * tokens if per_second and tokens else None,
            peak_bytes=self.peak(),
            loss=self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            reason=reason,
            seconds=seconds,
            build_seconds=self.build_seconds,
            warmup_seconds=self.warmup_seconds,
            compile_seconds=self._compiled() - self.compiled_before,
            steps=len(self.samples),
            composed=self.composed,
            warnings=(*(self.setup.warnings if self.setup else ()), *self._trend()),
        )

    def _trend(self) -> Iterator[str]:
        slower = slowed_by(self.samples)
        if slower > _TREND_TOLD:
            yield f"steps took {slower:.0%} longer at the end of the measurement than at its beginning."

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch memory inside."""
        yield

    def synchronize(self) -> None:  # noqa: B027 - the CPU has nothing to wait for
        """Wait for the device."""

    def before_timing(self) -> None:  # noqa: B027 - nor anything to be told
        """What the device needs said just before the timed steps."""

    @abstractmethod
    def over_budget(self) -> bool:
        """Whether memory passed what the budget leaves."""

    @abstractmethod
    def peak(self) -> PeakBytes:
        """Peak memory so far."""


class _CpuProbe(Probe):
    """The peak of tensor storage decides, which is the same on every run; a resource limit only guards the machine.

    What compiles is watched through the allocator, which cannot stop a run that is far over budget: the guard does.
    """

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        limit = int(self.cap * _NEAR_MISS)
        self.watch: AllocationRecord | StorageTracker = (
            AllocationRecord() if self.compiles else StorageTracker(limit=limit)
        )
        guard_cpu(limit)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self.watch:
            yield

    def over_budget(self) -> bool:
        return self.watch.peak > self.cap

    def peak(self) -> PeakBytes:
        return PeakBytes(allocated=self.watch.peak, resident=peak_resident_bytes())


class _CudaProbe(Probe):
    """The caching allocator under a hard cap, which fails where the smaller card would."""

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        self.used_by_others = used_bytes_without_context()
        segments.change(request.hardware.allocator)
        torch.cuda.init()
        self.total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, self.cap) / self.total), 0)
        torch.cuda.reset_peak_memory_stats()
        self.retries_before_timing = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def before_timing(self) -> None:
        self.retries_before_timing = self._retries()

    def over_budget(self) -> bool:
        return torch.cuda.max_memory_reserved() > self.cap

    def verdict(self) -> tuple[Outcome, str | None]:
        retries = self._retries() - self.retries_before_timing
        if retries:
            return Outcome.OUT_OF_MEMORY, f"the allocator had to empty its cache {retries} times in the timed steps"
        if peak_resident_bytes() > self.request.budget.host_bytes:
            return Outcome.HOST_OUT_OF_MEMORY, f"needs {peak_resident_bytes() / GIB:.2f} GiB of host memory"
        return super().verdict()

    def peak(self) -> PeakBytes:
        reserved = torch.cuda.max_memory_reserved()
        return PeakBytes(
            allocated=torch.cuda.max_memory_allocated(),
            reserved=reserved,
            device=reserved + max(self._context_bytes(), self.request.hardware.context_bytes),
            resident=peak_resident_bytes(),
        )

    def _context_bytes(self) -> int:
        """What this process holds beside the allocator; it grows as kernels are loaded, which the margin is for."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() - self.used_by_others

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
