"""Measurement: what one probe measured. Every figure that a recommendation rests on is here."""

import dataclasses
from collections.abc import Mapping
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
        """The bytes that count against the budget: the device's where there is one, else the tensors'."""
        return self.device or self.reserved or self.allocated

    def larger(self, other: "PeakBytes") -> "PeakBytes":
        """The larger of each figure that both have."""
        pairs = {name: (mine, getattr(other, name)) for name, mine in vars(self).items()}
        larger: dict[str, Any] = {name: None if None in pair else max(pair) for name, pair in pairs.items()}
        return PeakBytes(**larger)


@dataclass(frozen=True)
class Shortage:
    """What memory held when it ran out.

    Attributes:
        phase: of the step: "build", "forward", "backward" or "update".
        asked_bytes: the allocation that failed, where it is known.
        held: bytes by kind: weights, gradients, optimizer, and others, which are activations and temporaries.
        largest: the most that one block, or what lies beside the blocks, holds of one kind, the largest first.
    """

    phase: str
    asked_bytes: int | None
    held: Mapping[str, int]
    largest: Mapping[str, int]

    @property
    def words(self) -> str:
        """The same in a sentence or two."""
        asked = "" if self.asked_bytes is None else f", where {self.asked_bytes / GIB:.3g} GiB more did not fit"
        held, largest = (
            ", ".join(f"{name} {size / GIB:.3g}" for name, size in sizes.items() if size)
            for sizes in (self.held, self.largest)
        )
        return f"Memory ran out in the {self.phase}{asked}; held were, in GiB, {held}. The largest: {largest}."


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
    composed: bool = False  # the step time is put together from a few micro-batches and one optimizer step
    verified: bool = False  # measured again, longer, in fresh processes
    # Of the median, predicted: only the first of several ranks was measured, without the others; None: all were.
    communication_seconds: float | None = None
    warnings: tuple[str, ...] = ()
    shortage: Shortage | None = None  # of one that ran out of memory while it was watched

    @property
    def fits(self) -> bool:
        return self.outcome is Outcome.FITS

    @property
    def is_of_one_rank(self) -> bool:
        """Whether only the first of several ranks was measured."""
        return self.communication_seconds is not None

    @property
    def throughput(self) -> float:
        """Samples per second, 0 where nothing was timed; at equal work it ranks configs as tokens do."""
        return self.samples_per_second or 0.0

    def taking(self, seconds: float) -> "Measurement":
        """The same with another median step time, the interval and the throughput in proportion."""
        assert self.step_seconds, "only a step that was timed can be corrected"
        ratio = self.step_seconds.median / seconds
        return dataclasses.replace(
            self,
            step_seconds=StepSeconds(seconds, self.step_seconds.low / ratio, self.step_seconds.high / ratio),
            samples_per_second=self.samples_per_second and self.samples_per_second * ratio,
            tokens_per_second=self.tokens_per_second and self.tokens_per_second * ratio,
        )

    def waiting(self, seconds: float) -> "Measurement":
        """The same where ranks also wait so many seconds of a step for what they exchange, by prediction."""
        steps = self.step_seconds
        if not steps:
            return self
        longer = StepSeconds(steps.median + seconds, steps.low + seconds, steps.high + seconds)
        slower = self.taking(longer.median)
        return dataclasses.replace(slower, step_seconds=longer, communication_seconds=seconds)

    def faster(self, ratio: float) -> "Measurement":
        """The same at so many times the speed; unchanged where no step was timed."""
        return self.taking(self.step_seconds.median / ratio) if self.step_seconds else self

    def check_read(self) -> None:
        """Raise a ValueError for what no probe measures."""
        steps, peak = self.step_seconds, self.peak_bytes
        times = [self.seconds, self.build_seconds, self.warmup_seconds, self.compile_seconds]
        sizes = [each for each in vars(peak).values() if each is not None] if peak else []
        if min(*times, self.number, self.steps, *sizes) < 0:
            raise ValueError("a figure is below 0")
        if steps and min(vars(steps).values()) <= 0:
            raise ValueError("a step takes no time")
        speeds = [each for each in (self.samples_per_second, self.tokens_per_second) if each is not None]
        if any(each <= 0 for each in speeds):
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
        peak, steps, waited = self.peak_bytes, self.step_seconds, _rounded(self.communication_seconds)
        sizes = {name: getattr(peak, name) for name in ("allocated", "reserved", "device")} if peak else {}
        return {
            "tokens_per_second": _rounded(self.tokens_per_second),
            "samples_per_second": _rounded(self.samples_per_second),
            "step_seconds": {name: _rounded(value) for name, value in vars(steps).items()} if steps else None,
            "peak_gib": {name: size if size is None else round(size / GIB, 3) for name, size in sizes.items()} or None,
            "verified": self.verified and waited is None,
            **({"predicted_communication_seconds": waited} if waited is not None else {}),
        }


def _rounded(value: float | None) -> float | None:
    """Five significant figures: more than any timing is good for, and short enough to read."""
    return None if value is None else float(f"{value:.5g}")
