"""ExportSource: a result's config, and what other tools must know of its model, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError

WEIGHTS = "path/to/weights"  # for a model whose weights have no known name or directory
NOTHING_MEASURED = "Nothing was measured of this config: it is predicted."


@dataclass(frozen=True)
class ExportSource:
    """Nearly all of it stands in a result.yaml.

    `weights` is a hub id or a directory. `targets` names the layers that get adapters, as peft matches names; `outputs`
    those of them that compute the model's outputs, `heads` the layers trained whole beside adapters. `off` holds the
    off value of every registered knob.
    """

    model: str
    config: Config
    hardware: Mapping[str, Any]
    task: str = "custom"
    sequence_length: int | None = None
    effective_batch_size: int | None = None
    measured: Mapping[str, Any] | None = None
    predicted: Mapping[str, Any] | None = None  # the figures, where nothing was measured
    versions: Mapping[str, str] = field(default_factory=dict)
    weights: str = WEIGHTS
    targets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    off: Mapping[str, Value] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.hardware.get("device", "cuda"))

    @property
    def inner_targets(self) -> list[str]:
        """The targets without the output head."""
        return [name for name in self.targets if name not in self.outputs]


def check_batch_sizes(micro: int, steps: int, effective: int | None) -> None:
    """Raise InputError where the micro-batches of a step do not make the effective batch, if that is known."""
    if effective not in (None, micro * steps):
        message = f"micro_batch_size {micro} x gradient_accumulation_steps {steps} is not the effective batch"
        raise InputError(f"{message} of {effective}.", "Search again, or correct the config.")
