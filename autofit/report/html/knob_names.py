"""A config as a table in words: what each knob that is on does, for who does not know the knobs' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.counted import counted
from autofit.report.formatting import value

_OFF = (None, False, 0, "none")
_BESIDE_OTHERS = ("gradient_accumulation_steps", "lora_targets", "lora_alpha", "lora_dropout")
_TITLES = {
    "precision": "Numbers",
    "micro_batch_size": "Micro-batch",
    "activation_checkpointing": "Checkpointing",
    "activation_offload": "Activations",
    "lora_rank": "Trained",
    "quantization": "Frozen weights",
    "optimizer": "Optimizer",
    "optimizer_offload": "Optimizer state",
    "optimizer_in_backward": "Update",
    "parameter_offload": "Frozen weights kept",
    "compile": "Compiler",
    "attention": "Attention",
    "loss": "Loss",
    "kernels": "Kernels",
}
_WORDS: dict[str, dict[Any, str]] = {
    "precision": {
        "fp32": "32-bit floats throughout",
        "tf32": "32-bit floats, matrix products in TF32",
        "bf16": "bfloat16 throughout: weights, gradients and optimizer state",
        "bf16-mixed": "trained weights in 32 bits, computing in bfloat16 (autocast)",
        "fp16-mixed": "trained weights in 32 bits, computing in float16 with a loss scaler",
        "fp8": "bfloat16 weights, matrix products in 8-bit floats",
    },
    "activation_checkpointing": {
        "full": "every block is computed again in the backward",
        "alternate": "every second block is computed again in the backward",
        "selective": "all but matrix products and attention is computed again in the backward",
    },
    "activation_offload": {"cpu": "wait for the backward in host memory"},
    "quantization": {
        "int8": "in 8 bits",
        "nf4": "in 4 bits (NF4)",
        "nf4-dq": "in 4 bits (NF4, double quantised)",
    },
    "optimizer": {
        "adamw": "AdamW",
        "adamw-foreach": "AdamW, many tensors at a time",
        "adamw-8bit": "AdamW with its state in 8 bits",
        "adamw-4bit": "AdamW with its state in 4 bits",
        "adamw-fp8": "AdamW with its state in 8-bit floats",
        "paged-adamw-8bit": "AdamW with its state in 8 bits, paged to host memory",
        "adafactor": "Adafactor",
        "sgd": "SGD",
    },
    "optimizer_offload": {"cpu": "in host memory"},
    "optimizer_in_backward": {True: "each weight as soon as its gradient is there"},
    "parameter_offload": {"cpu": "in host memory, fetched block by block"},
    "compile": {
        "default": "blocks are compiled (torch.compile)",
        "max-autotune-no-cudagraphs": "blocks are compiled and their kernels tuned",
    },
    "attention": {
        "sdpa": "PyTorch's fused attention",
        "eager": "plain matrix products",
        "flash": "FlashAttention",
    },
    "loss": {
        "standard": "over all logits at once",
        "chunked": "in chunks, never holding all logits",
        "fused": "in one kernel, never holding all logits",
    },
    "kernels": {"liger": "Liger's"},
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a title, what it means, and the knob as YAML has it."""

    title: str
    words: str
    knob: str


def config_rows(config: Mapping[str, Any]) -> list[Row]:
    """Every knob that is on, in the order of the config; what trains all weights is told too."""
    return [_row(config, knob) for knob in config if knob not in _BESIDE_OTHERS and not _is_off(config, knob)]


def off_knobs(config: Mapping[str, Any]) -> list[str]:
    """The knobs that do nothing."""
    return [knob for knob in config if knob not in _BESIDE_OTHERS and _is_off(config, knob)]


def _is_off(config: Mapping[str, Any], knob: str) -> bool:
    return config[knob] in _OFF and knob != "lora_rank"


def _row(config: Mapping[str, Any], knob: str) -> Row:
    given = config[knob]
    written = f"{knob}: {value(given)}"
    words = _WORDS.get(knob, {}).get(given)
    if knob == "micro_batch_size":
        words, written = _batch(config)
    elif knob == "lora_rank":
        words, written = _lora(config)
    elif words is None and str(given).startswith("budget-"):
        words = f"the compiler keeps about {float(str(given).removeprefix('budget-')):.0%} of the activations"
    title = _TITLES.get(knob, knob.replace("_", " ").capitalize())
    return Row(title, words or value(given), written)


def _batch(config: Mapping[str, Any]) -> tuple[str, str]:
    size, times = config["micro_batch_size"], config.get("gradient_accumulation_steps") or 1
    written = f"micro_batch_size: {size}, gradient_accumulation_steps: {times}"
    samples = f"{counted(size, 'sample')} at a time"
    return (f"{samples}, {times} times for each update" if times > 1 else f"{samples}, the whole batch"), written


def _lora(config: Mapping[str, Any]) -> tuple[str, str]:
    rank = config["lora_rank"]
    if not rank:
        return "all weights", "lora_rank: 0"
    targets = str(config.get("lora_targets")).replace("all-linear+head", "all linear layers and the head")
    targets = targets.replace("all-linear", "all linear layers")
    return (
        f"LoRA adapters of rank {rank} on {targets}",
        f"lora_rank: {rank}, lora_targets: {config.get('lora_targets')}",
    )
