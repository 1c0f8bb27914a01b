"""What is predicted of a Config without running it: its Estimate, its memory's Timeline. Data
only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.notebook import as_html
from autofit.core.plain import from_plain, to_plain

Fits = Literal["yes", "maybe", "no"]
# On several devices: whole weights of other ranks, and buffers in which gradients are summed.
OF_SEVERAL = ("gathered", "reduced")
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    *OF_SEVERAL,
    "temporary",
    "context",
)
# In the order of what they cost: time alone, memory of the host, rounding, what is learnt, the
# data, more hardware.
REMEDIES = ("time", "host", "numbers", "lora", "qlora", "shorter", "devices", "memory")
# In the order in which a chart stacks them.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    *OF_SEVERAL,
    "temporary",
)


@dataclass(frozen=True)
class Resting:
    """What one device holds between steps, for comparison with what one knows of a model.

    Sizes are bytes.

    Attributes:
        gradients: of all trained weights at once; 0 where each is applied as it comes.
        trained, parameters: their numbers on all devices together, adapters included; `parameters`
            None: not known.
        blocks: how many repeated blocks the model has.
        activations: bytes that one of them keeps of a micro-batch from its forward to its backward,
            in the median.
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    trained: int
    parameters: int | None
    blocks: int
    activations: int | None


@dataclass(frozen=True)
class Estimate:
    """Predicted memory in bytes and time in seconds of one optimizer step of a Config.

    Attributes:
        allocated_bytes: the largest sum of live tensors.
        reserved_bytes: memory the caching allocator reserves for them; None on a CPU, which has
            none.
        low, high: the interval that the device's total is expected in, of the largest of a step, an
            evaluation and a saving; on a CPU, that of the tensors alone.
        breakdown: the peak by PARTS, at its moment; sums to allocated + context.
        step_seconds: of an optimizer step over the effective batch; None where the device's speed
            is unknown.
        bottleneck: what limits the speed: "compute", "memory" or "transfer".
        utilisation: predicted model FLOPs utilisation, of the device's peak in the format computed
            in.
        notes: what the prediction leaves out or only bounds.
        budget: the memory that it is compared with, where one was given.
        resting: what is held between steps; None where the config was not followed by itself.
        host_bytes: what the host holds of all that is offloaded; pinned buffers take up to the next
            power of two.
        evaluation_bytes: the largest sum of live tensors while a micro-batch of this size is
            evaluated between two steps; None where that could not be followed.
        saving_bytes: the same while a checkpoint and the model are saved.
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
    resting: Resting | None = None
    host_bytes: int = 0
    evaluation_bytes: int | None = None
    saving_bytes: int | None = None

    @property
    def verdict(self) -> Fits | None:
        """Whether it fits the budget it was made for; None without one."""
        if self.budget is None:
            return None
        return self.fits(self.budget)

    def fits(self, budget: Budget) -> Fits:
        """The verdict: "no" only where even the low end exceeds what the budget leaves."""
        device = "cpu" if self.reserved_bytes is None else "cuda"
        limit = budget.cap_bytes(device)

        if self.low > limit:
            return "no"
        if self.high <= limit:
            return "yes"
        return "maybe"

    def to_predicted(self) -> dict[str, Any]:
        """The `predicted:` block of result.yaml: the figures, beside the config."""
        figures = self.to_dict()
        del figures["config"]
        return figures

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], budget: Budget | None = None) -> "Estimate":
        """The inverse of `to_dict`, which leaves out the budget."""
        figures = dict(data)
        interval = figures.pop("device_bytes")
        figures.pop("fits", None)

        estimate: Estimate = from_plain(cls, {**figures, **interval})
        return replace(estimate, budget=budget)

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The keys of `autofit estimate --json`, but for the schema."""
        data: dict[str, Any] = to_plain(self)
        del data["budget"]

        data["device_bytes"] = {"low": data.pop("low"), "high": data.pop("high")}
        data["fits"] = self.verdict
        return data


@dataclass(frozen=True)
class Remedy:
    """A config that is expected to fit where another one does not, and what it costs.

    Attributes:
        kind: what is given up, one of REMEDIES.
        options: what to add to the command.
        config: what is then run, on `devices` of each node.
        device_bytes: the upper end of what it is expected to need of a device.
        step_seconds, samples_per_second: as predicted, or as measured; None where neither is known.
        measured: whether the figures are those of a measurement.
    """

    kind: str
    options: tuple[str, ...]
    config: Config
    device_bytes: int
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    measured: bool = False
    devices: int = 1


@dataclass(frozen=True)
class Timeline:
    """Live memory through one training step of a Config, from a trace on tensors without storage.

    Attributes:
        moments: bytes by KINDS, at the fullest moment of each stretch; the peak is one of them.
        at: when each moment is, from 0 to 1: a share of the time, or of the allocations and frees.
        phases: (name, when it begins) of forward, backward and update.
        timed: whether `at` is a share of the predicted time, because the device's speed is known.
        peak_bytes: of the whole run, memory held before the step included.
        micro_batches: their number in a step; the timeline shows the last one and the update.
        bottleneck: as of an Estimate.
    """

    config: Config
    moments: tuple[tuple[int, ...], ...]
    at: tuple[float, ...]
    phases: tuple[tuple[str, float], ...]
    timed: bool
    peak_bytes: int
    peak_phase: str
    micro_batches: int = 1
    resting: Resting | None = None
    bottleneck: str | None = None

    def check_read(self) -> None:
        """Raise a ValueError unless each moment has its time, and the size of each kind."""
        widths = set(map(len, self.moments))
        if len(widths) != 1 or len(self.at) != len(self.moments) or self.micro_batches < 1:
            raise ValueError("a timeline has no moments, or they are of different lengths")

    @property
    def fullest(self) -> int:
        """The index of the fullest moment."""
        totals = [sum(moment) for moment in self.moments]
        return totals.index(max(totals))
