"""What a knob may add to the emitted script, and what it may look at to say so. The knobs themselves are in `knobs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autofit.core.config import Config

_JOINED = (
    "standard",
    "imports",
    "packages",
    "constants",
    "functions",
    "adapt",
    "place",
    "forward",
    "around_step",
    "start",
    "save",
)


@dataclass(frozen=True)
class Case:
    """What is to be emitted: the config, and what it trains on which device."""

    config: Config
    task: str
    device: str
    micro_batch_size: int
    sequence_length: int | None
    model_config: Mapping[str, Any]  # as transformers writes it
    versions: Mapping[str, str] = field(default_factory=dict)  # of what was there when it was measured

    @property
    def lora(self) -> bool:
        """Whether weights are frozen and adapters trained."""
        return bool(self.config.get("lora_rank"))

    @property
    def classifies(self) -> bool:
        """Whether the model ends in a new head for classes."""
        return self.task.endswith("classification")


@dataclass(frozen=True)
class Fragments:
    """Lines for the places of the script that knobs may change.

    `load_dtype` is what weights are read in; `quantization` the arguments of the BitsAndBytesConfig that reads them;
    `adapt` changes the loaded model, and `place` comes after all of that; `forward` are contexts that surround the
    forward pass, and `around_step` those that surround its backward too; `input_dtype` is what images are cast to;
    `loss` is a function of (model, batch) in the place of the model's own loss, and `functions` are texts of functions
    used by these lines; `scaler` makes a loss scaler; `start` runs before anything is loaded; `save` replaces the plain
    saving; `comment` names the knob that chose the optimizer.
    """

    standard: tuple[str, ...] = ()  # imports of the standard library
    imports: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # that must be there without being imported
    constants: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    load_dtype: str | None = None
    quantization: tuple[str, ...] = ()
    quantized: str | None = None  # to what
    adapt: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    around_step: tuple[str, ...] = ()
    input_dtype: str | None = None
    loss: str | None = None
    scaler: str | None = None
    start: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    held: str | None = None  # how the weights are held, in words
    optimizer: str | None = None  # the call that makes it for {groups}, with {decay}
    comment: str | None = None
    stepped_in_backward: bool = False

    def joined(self, other: Fragments) -> Fragments:
        """Both together: lines one after the other, single things from whoever has them."""
        merged: dict[str, Any] = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            merged[each.name] = mine + theirs if each.name in _JOINED else mine or theirs
        return Fragments(**merged)
