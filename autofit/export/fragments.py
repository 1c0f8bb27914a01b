"""What a knob adds to train.py (Fragments), and what it may look at to do so (Case). The knobs are
in `knobs`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.core.task import Task
from autofit.models.fake_quantised import FakeQuantisation


@dataclass(frozen=True)
class Case:
    """The config, and what it trains on which device."""

    config: Config
    task: Task
    device: str
    micro_batch_size: int
    sequence_length: int | None
    model_config: Mapping[str, Any]  # as transformers writes it
    # of the packages it was measured with
    versions: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False  # packed samples do not see one another
    parts: tuple[str, ...] = ()  # what alone is trained, where not all of the model is
    cuts: tuple[int, ...] = ()  # the first block of each stage, and the number of all
    asks_inputs: bool = False  # gradients flow back to what the embeddings give
    rounds: FakeQuantisation | None = None  # how linear layers do for quantised inference

    @property
    def layout(self) -> Layout:
        """How the devices are divided."""
        return Layout.of(self.config)

    @property
    def lora(self) -> bool:
        """Whether weights are frozen and adapters trained."""
        return bool(self.config.lora_rank)

    @property
    def frozen(self) -> bool:
        """Whether weights are frozen, below adapters, a head or other parts."""
        return self.lora or bool(self.config.head_only) or bool(self.parts)

    @property
    def shards(self) -> bool:
        """Whether weights are divided over several devices, which each block reaches as it is
        divided."""
        return self.config.data_parallel == "fsdp"

    @property
    def is_divided(self) -> bool:
        """Whether no device holds the whole model."""
        return self.shards or self.layout.pipeline > 1

    @property
    def adapts_head(self) -> bool:
        """Whether the output head gets an adapter, as far as names tell."""
        return any(part.endswith("head") for part in str(self.config.lora_targets).split("+"))

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        numbers = [value for name, value in self.model_config.items() if "experts" in name]
        return any(type(number) is int and number > 1 for number in numbers)

    @property
    def frozen_dtype(self) -> str:
        """The format of models that are asked and not trained."""
        if self.config.precision.startswith(("bf16", "fp8")):
            return "torch.bfloat16"
        if self.config.precision.startswith("fp16"):
            return "torch.float16"
        return "torch.float32"

    @property
    def has_new_head(self) -> bool:
        """Whether the model ends in a new head, which is trained whole."""
        return self.task.has_new_head


@dataclass(frozen=True)
class Parts:
    """What several knobs make together."""

    def joined(self, other: Self) -> Self:
        """Both together: lines and keywords one after the other, single values from whichever has
        them."""
        merged: dict[str, Any] = {}
        for part in fields(self):
            mine = getattr(self, part.name)
            its = getattr(other, part.name)
            if isinstance(mine, Mapping):
                merged[part.name] = {**mine, **its}
            elif isinstance(mine, tuple):
                merged[part.name] = mine + its
            else:
                merged[part.name] = mine or its

        return type(self)(**merged)


@dataclass(frozen=True)
class Fragments(Parts):
    """Lines for the places of the script that knobs may change."""

    standard: tuple[str, ...] = ()  # imports of the standard library
    imports: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # that must be installed without being imported
    constants: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()  # texts of functions that the other lines use
    load_dtype: str | None = None  # of weights as they are read
    quantization: tuple[str, ...] = ()  # arguments of BitsAndBytesConfig
    quantized: str | None = None  # to what, in words
    adapt: tuple[str, ...] = ()  # changes the loaded model
    place: tuple[str, ...] = ()  # after all of `adapt`
    shard: tuple[str, ...] = ()  # after that: divides the model
    forward: tuple[str, ...] = ()  # contexts around the forward pass
    micro: tuple[str, ...] = ()  # before each micro-batch of several devices
    around_step: tuple[str, ...] = ()  # contexts around forward and backward
    input_dtype: str | None = None  # of images
    companions: tuple[str, ...] = ()  # makes the models that the loss asks beside the trained one
    asked_first: tuple[str, ...] = ()  # asks the model of all data before training
    loss: str | None = None  # a function of (model, batch) instead of the model's own loss
    scaler: str | None = None  # the call that makes a loss scaler
    start: tuple[str, ...] = ()  # before anything is loaded
    spread: tuple[str, ...] = ()  # puts the model on several devices
    gather: tuple[str, ...] = ()  # what all processes do before one of them saves
    save: tuple[str, ...] = ()  # instead of the plain saving
    held: str | None = None  # how the weights are held, in words
    optimizer: str | None = None  # the call that makes it for {groups}, with {lr} and {decay}
    stepped_parts: tuple[str, ...] = ()  # puts the parts of weights in their place for it
    faster: str | None = None  # how many times faster the second matrices of adapters are trained
    comment: str | None = None  # names the knob that chose the optimizer
    stepped_in_backward: bool = False
