"""Measurement: what one probe measured. Every figure that a recommendation rests on is here."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.plain import Loss, from_plain, to_plain

BATCH_NORM = "BatchNorm"  # how a warning begins that the first line of an answer repeats


class Outcome(StrEnum):
    """How a probe ended; no kind is ever folded into another."""

    FITS = "fits"
    OUT_OF_MEMORY = "out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    REFUSED = "refused"
    DIVERGED = "diverged"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True)
class StepSeconds:
    """Median time of a whole optimizer step, with the 95 % interval of that median."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PeakBytes:
    """Peak memory. `reserved` and `device` are None on CPU."""

    allocated: int  # of tensors; on CPU the tracked peak of their storage
    reserved: int | None = None  # of the caching allocator
    device: int | None = None  # that and the context
    resident: int | None = None  # the process's largest resident set in host memory

    @property
    def held_bytes(self) -> int:
        """The bytes that count against the budget: the device's, or on a CPU the tensors'."""
        return self.device or self.reserved or self.allocated

    def larger(self, other: "PeakBytes") -> "PeakBytes":
        """The larger of each figure that both have."""
        larger: dict[str, Any] = dict.fromkeys(vars(self))
        for name in larger:
            sizes = (getattr(self, name), getattr(other, name))
            if None not in sizes:
                larger[name] = max(sizes)
        return PeakBytes(**larger)


@dataclass(frozen=True)
class OomSnapshot:
    """What memory held when it ran out.

    Attributes:
        phase: of the step: "build", "forward", "backward" or "update".
        asked_bytes: the allocation that failed, where it is known.
        held: bytes by kind: weights, gradients, optimizer, and others, which are activations and
            temporaries.
        largest: the most that one block, or what lies beside the blocks, holds of one kind, the
            largest first.
    """

    phase: str
    asked_bytes: int | None
    held: Mapping[str, int]
    largest: Mapping[str, int]

    @property
    def words(self) -> str:
        """The same in a sentence or two."""
        asked = ""
        if self.asked_bytes is not None:
            asked = f", where {self.asked_bytes / GIB:.3g} GiB more did not fit"

        held = _sizes_in_gib(self.held)
        largest = _sizes_in_gib(self.largest)
        sentence = f"Memory ran out in the {self.phase}{asked}; held were, in GiB, {held}."
        return f"{sentence} The largest: {largest}."


def _sizes_in_gib(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in sizes.items() if size)


@dataclass(frozen=True)
class Measurement:
    """One probe of one Config."""

    config: Config
    outcome: Outcome
    number: int = 0
    step_seconds: StepSeconds | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: PeakBytes | None = None
    loss: Loss | None = None
    reason: str | None = None
    seconds: float = 0.0  # the probe's wall time, of which the next two are part
    build_seconds: float = 0.0
    warmup_seconds: float = 0.0
    compile_seconds: float = 0.0  # of torch.compile, of which the step time holds nothing
    steps: int = 0
    composed: bool = False  # the step time is a sum: a few micro-batches and one optimizer step
    verified: bool = False  # measured again, longer, in fresh processes
    # The predicted part of the step time, where only the first of several ranks was measured.
    communication_seconds: float | None = None
    warnings: tuple[str, ...] = ()
    shortage: OomSnapshot | None = None  # of one that ran out of memory while it was watched

    @property
    def fits(self) -> bool:
        return self.outcome is Outcome.FITS

    @property
    def is_of_one_rank(self) -> bool:
        """Whether only the first of several ranks was measured."""
        return self.communication_seconds is not None

    @property
    def throughput(self) -> float:
        """Samples per second, 0 where nothing was timed; at equal work it ranks as tokens do."""
        return self.samples_per_second or 0.0

    def taking(self, seconds: float) -> "Measurement":
        """The same with another median step time, the interval and the throughput in proportion."""
        steps = self.step_seconds
        assert steps, "only a step that was timed can be corrected"
        ratio = steps.median / seconds
        return dataclasses.replace(
            self,
            step_seconds=StepSeconds(seconds, steps.low / ratio, steps.high / ratio),
            samples_per_second=self.samples_per_second and self.samples_per_second * ratio,
            tokens_per_second=self.tokens_per_second and self.tokens_per_second * ratio,
        )

    def waiting(self, seconds: float) -> "Measurement":
        """The same with predicted seconds of exchange between ranks added to each step."""
        steps = self.step_seconds
        if not steps:
            return self

        longer = StepSeconds(steps.median + seconds, steps.low + seconds, steps.high + seconds)
        slower = self.taking(longer.median)
        return dataclasses.replace(slower, step_seconds=longer, communication_seconds=seconds)

    def faster(self, ratio: float) -> "Measurement":
        """The same at so many times the speed; unchanged where no step was timed."""
        if not self.step_seconds:
            return self
        return self.taking(self.step_seconds.median / ratio)

    def check_read(self) -> None:
        """Raise a ValueError for what no probe measures."""
        figures = [
            self.number,
            self.steps,
            self.seconds,
            self.build_seconds,
            self.warmup_seconds,
            self.compile_seconds,
        ]
        if self.peak_bytes:
            figures += [size for size in vars(self.peak_bytes).values() if size is not None]
        if min(figures) < 0:
            raise ValueError("a figure is below 0")

        if self.step_seconds and min(vars(self.step_seconds).values()) <= 0:
            raise ValueError("a step takes no time")
        for speed in (self.samples_per_second, self.tokens_per_second):
            if speed is not None and speed <= 0:
                raise ValueError("a speed is not above 0")

    def to_trial(self) -> dict[str, Any]:
        """An element of `trials` in --json, and of the journal."""
        return dict(to_plain(self))

    @classmethod
    def from_trial(cls, data: dict[str, Any]) -> "Measurement":
        """The inverse of `to_trial`."""
        measurement: Measurement = from_plain(cls, data)
        return measurement

    def to_measured(self) -> dict[str, Any]:
        """The `measured:` block of result.yaml and of `best` and `tiers` in --json."""
        step_seconds = None
        if self.step_seconds:
            step_seconds = {name: _rounded(time) for name, time in vars(self.step_seconds).items()}

        peak_gib = None
        if self.peak_bytes:
            peak_gib = {name: _in_gib(size) for name, size in vars(self.peak_bytes).items()}
            del peak_gib["resident"]

        measured = {
            "tokens_per_second": _rounded(self.tokens_per_second),
            "samples_per_second": _rounded(self.samples_per_second),
            "step_seconds": step_seconds,
            "peak_gib": peak_gib,
            "verified": self.verified and not self.is_of_one_rank,
        }
        if self.is_of_one_rank:
            measured["predicted_communication_seconds"] = _rounded(self.communication_seconds)
        return measured


def that_fit(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those of configs that fit."""
    return [measurement for measurement in measurements if measurement.fits]


def _in_gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 3)


def _rounded(value: float | None) -> float | None:
    """Five significant figures: more than any timing is good for, and short enough to read."""
    return None if value is None else float(f"{value:.5g}")
