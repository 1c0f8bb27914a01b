"""Estimate: what is predicted of one Config without running it. The sibling of Measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.notebook import as_html

Fits = Literal["yes", "maybe", "no"]
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "context")


@dataclass(frozen=True)
class Estimate:
    """Predicted memory in bytes and time in seconds of one optimizer step of a Config.

    Attributes:
        allocated_bytes: the largest sum of live tensors.
        reserved_bytes: what the caching allocator takes for them; None on a CPU, which has none.
        low, high: the interval that the device's total is expected in. On a CPU, of the tensors alone.
        breakdown: what the peak consists of at its moment, by PARTS; sums to allocated + context.
        step_seconds: of an optimizer step over the effective batch; None where nothing is known of the device's speed.
        bottleneck: what the time goes to: "compute", "memory" or "transfer".
        utilisation: predicted model FLOPs utilisation, of the device's peak in the format computed in.
        notes: what the prediction leaves out or bounds only.
        budget: the memory that was asked about, where one was.
    """

    config: Config
    allocated_bytes: int
    reserved_bytes: int | None
    low: int
    high: int
    breakdown: Mapping[str, int]
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    bottleneck: str | None = None
    utilisation: float | None = None
    notes: tuple[str, ...] = ()
    budget: Budget | None = None

    @property
    def verdict(self) -> Fits | None:
        """Whether it fits the memory that was asked about."""
        return None if self.budget is None else self.fits(self.budget)

    def fits(self, budget: Budget) -> Fits:
        """The verdict: no only when even the low end exceeds what the budget leaves."""
        most = int(budget.device_bytes * (1 - budget.margin)) if self.reserved_bytes is not None else None
        limit = budget.device_bytes if most is None else most
        return "no" if self.low > limit else "yes" if self.high <= limit else "maybe"

    def to_predicted(self) -> dict[str, Any]:
        """The `predicted:` block of result.yaml: the figures, beside the config."""
        return {name: figure for name, figure in self.to_dict().items() if name != "config"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], budget: Budget | None = None) -> Estimate:
        """The inverse of `to_dict`, but for the budget."""
        figures = {name: figure for name, figure in data.items() if name not in ("device_bytes", "fits")}
        figures |= {"config": Config(data["config"]), "notes": tuple(data["notes"]), "budget": budget}
        return cls(**figures, **data["device_bytes"])

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The keys of `autofit estimate --json`, but for the schema."""
        return {
            "config": dict(self.config),
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": {"low": self.low, "high": self.high},
            "breakdown": dict(self.breakdown),
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "fits": self.verdict,
            "bottleneck": self.bottleneck,
            "utilisation": self.utilisation,
            "notes": list(self.notes),
        }
