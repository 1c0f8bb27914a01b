"""What knobs take, how they and their values read, which are off, and which decide how faithfully a config learns.

The registry, the reports and the exports all read this one table. A knob without a row is called by its own name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Value
from autofit.core.errors import InputError, shown, unknown

# The order in which knobs break a tie between equally fast configs; full training comes first.
FIDELITY_ORDER = ("quantization", "precision", "optimizer", "lora_rank", "lora_targets")

# Optimizers that keep small updates of bf16 weights, which others round away.
KEEP_SMALL_UPDATES = ("adamw-master", "adamw-sr", "adamw-8bit-sr")

COMPUTES_IN_FP32 = ("fp32", "tf32")  # precisions whose losses agree to about 1e-3, whatever computes them


def is_off(value: object) -> bool:
    """Whether a value is one of those that stand for "off", whatever the knob."""
    return value in (None, False, 0, "none", "standard")


def yaml_word(value: object) -> str:
    """A knob's value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Knob:
    """The values that a knob takes, whatever the model and the hardware; the fields are those of its Technique."""

    name: str
    off: Value = None
    values: tuple[Value, ...] = ()
    nullable: bool = False
    numbers: tuple[float, float] | None = None
    pattern: str = ""  # of further words
    takes: str = ""

    @property
    def description(self) -> str:
        """What it takes, in one line."""
        return self.takes or ", ".join(map(yaml_word, self.values))

    def accepts(self, value: object) -> bool:
        """Whether it takes a value, of that very type: 1 is not True."""
        listed = (self.off, *self.values, *((None,) if self.nullable else ()))
        if any(value == each and type(value) is type(each) for each in listed):
            return True
        if self.pattern and isinstance(value, str):
            return re.fullmatch(self.pattern, value) is not None
        if self.numbers is None or not isinstance(value, int | float) or isinstance(value, bool):
            return False
        least, end = self.numbers
        return least <= value < end and (isinstance(value, int) or isinstance(least, float))

    def check(self, value: object) -> None:
        """Raise an InputError for a value that it does not take."""
        if not self.accepts(value):
            raise self.refusal(value)

    def refusal(self, value: object) -> InputError:
        """The error for a value that it does not take."""
        if isinstance(value, str) and not self.takes:
            return unknown(f"value for {self.name}", value, map(yaml_word, self.values))
        remedy = f"It takes {self.takes}." if self.takes else f"Choose from: {self.description}." if self.values else ""
        return InputError(f"{self.name} cannot be {'null' if value is None else shown(value)}.", remedy)


@dataclass(frozen=True)
class KnobWords:
    """How one knob reads."""

    title: str  # of its row in a table
    short: str  # in a list of knobs; `{value}` and the names of other knobs are replaced by their values
    off: str = ""  # in a list of knobs, where it is off and another config has it on
    values: Mapping[Any, str] = field(default_factory=dict)  # what each value does


KNOB_WORDS = {
    "precision": KnobWords(
        "Numbers",
        "{value}",
        values={
            "fp32": "32-bit floats throughout",
            "tf32": "32-bit floats, matrix products in TF32",
            "bf16": "bfloat16 throughout: weights, gradients and optimizer state",
            "bf16-mixed": "trained weights in 32 bits, computing in bfloat16 (autocast)",
            "fp16-mixed": "trained weights in 32 bits, computing in float16 with a loss scaler",
            "fp8": "bfloat16 weights, matrix products in 8-bit floats",
        },
    ),
    "micro_batch_size": KnobWords("Micro-batch", "micro-batch {value}x{gradient_accumulation_steps}"),
    "activation_checkpointing": KnobWords(
        "Checkpointing",
        "checkpointing {value}",
        "no checkpointing",
        {
            "full": "every block is computed again in the backward",
            "alternate": "every second block is computed again in the backward",
            "selective": "all but matrix products and attention is computed again in the backward",
        },
    ),
    "activation_offload": KnobWords(
        "Activations",
        "activations offloaded",
        "activations on the device",
        {"cpu": "wait for the backward in host memory"},
    ),
    "lora_rank": KnobWords("Trained", "LoRA {value} {lora_targets}", "no LoRA"),
    "head_only": KnobWords("Trained", "head alone", "all weights trained", {True: "the output layer alone"}),
    "lora_dora": KnobWords("Adapters", "DoRA", "plain LoRA", {True: "with the lengths of rows (DoRA)"}),
    "lora_rslora": KnobWords("Scale", "rsLoRA", "plain scale", {True: "alpha / sqrt(rank) (rsLoRA)"}),
    "quantization": KnobWords(
        "Frozen weights",
        "{value} weights",
        "unquantised weights",
        {"int8": "in 8 bits", "nf4": "in 4 bits (NF4)", "nf4-dq": "in 4 bits (NF4, double quantised)"},
    ),
    "optimizer": KnobWords(
        "Optimizer",
        "{value}",
        values={
            "adamw": "AdamW",
            "adamw-foreach": "AdamW, many tensors at a time",
            "adamw-8bit": "AdamW with its state in 8 bits",
            "adamw-4bit": "AdamW with its state in 4 bits",
            "adamw-fp8": "AdamW with its state in 8-bit floats",
            "paged-adamw-8bit": "AdamW with its state in 8 bits, paged to host memory",
            "paged-adamw": "AdamW with its state paged to host memory",
            "adamw-master": "AdamW on 32-bit copies of the weights",
            "adamw-sr": "AdamW that rounds its weights stochastically",
            "adamw-8bit-sr": "AdamW with its state in 8 bits that rounds its weights stochastically",
            "lion-8bit": "Lion with its state in 8 bits",
            "muon": "Muon for matrices of blocks, AdamW for all else",
            "adafactor": "Adafactor",
            "sgd": "SGD",
        },
    ),
    "optimizer_offload": KnobWords(
        "Optimizer state", "optimizer offloaded", "optimizer on the device", {"cpu": "in host memory"}
    ),
    "optimizer_in_backward": KnobWords(
        "Update",
        "update in the backward",
        "update after the backward",
        {True: "each weight as soon as its gradient is there"},
    ),
    "parameter_offload": KnobWords(
        "Weights kept",
        "weights offloaded",
        "weights on the device",
        {"cpu": "in host memory, fetched block by block"},
    ),
    "compile": KnobWords(
        "Compiler",
        "compiled {value}",
        "no compilation",
        {
            "default": "blocks are compiled (torch.compile)",
            "max-autotune-no-cudagraphs": "blocks are compiled and their kernels tuned",
        },
    ),
    "attention": KnobWords(
        "Attention",
        "{value} attention",
        values={"sdpa": "PyTorch's fused attention", "eager": "plain matrix products", "flash": "FlashAttention"},
    ),
    "loss": KnobWords(
        "Loss",
        "{value} loss",
        "standard loss",
        {
            "standard": "over all logits at once",
            "chunked": "in chunks, never holding all logits",
            "fused": "in one kernel, never holding all logits",
        },
    ),
    "kernels": KnobWords("Kernels", "{value} kernels", "PyTorch's kernels", {"liger": "Liger's"}),
    "data_parallel": KnobWords(
        "Devices",
        "{value}",
        values={"ddp": "each holds all weights", "fsdp": "weights are divided among them, gathered block by block"},
    ),
    "data_parallel_replicate": KnobWords("Replicas", "{value} replicas"),
    "data_parallel_shard": KnobWords("Shards", "{value} shards"),
    "reshard_after_forward": KnobWords(
        "Gathered weights",
        "reshard {value}",
        "no resharding",
        values={True: "are given up after the forward", False: "are kept from the forward to the backward"},
    ),
    "fsdp_offload": KnobWords("Shards kept", "shards offloaded", "shards on the device", {"cpu": "in host memory"}),
    "tensor_parallel": KnobWords("Layers", "layers split in {value}"),
    "context_parallel": KnobWords("Tokens", "tokens split in {value}"),
}
