"""ExportSource: a found config and what other tools must know of its model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config, Value

WEIGHTS = "path/to/weights"  # where nobody knows whose weights are to be trained

NOTHING_MEASURED = "Nothing was measured of this config: it is predicted."


def as_predicted(words: str) -> str:
    """What is said of a measured config, of one that is predicted."""
    return words.replace("measured", "predicted")


@dataclass(frozen=True)
class ExportSource:
    """Nearly all of it stands in a result.yaml.

    `weights` is a hub id or a directory. `targets` are names of the layers that adapters are put beside, `outputs` of
    those among them that make the outputs, `heads` of those trained whole beside adapters, as peft matches names. `off`
    holds the off value of every knob.
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
