"""Keys of tools that are built on transformers' Trainer, taken from `trainer`.

Off values are written out, because the defaults of these tools differ: TRL and LLaMA-Factory checkpoint by default, and
TRL loads weights in float32.
"""

from collections.abc import Mapping
from typing import Any

from autofit.core.errors import InputError
from autofit.export.source import ExportSource
from autofit.export.tool import Request, Share, ToolKeys
from autofit.export.trainer import TRAINER_KNOBS, TrainerCase, TrainerKeywords, batch_sizes

RENAMED = "5.23.0"  # of transformers, where gradient_checkpointing became activation_checkpointing
OFFLOADS = "5.17.0"  # of transformers, where checkpointing got an option to offload
_OFF: Mapping[str, Mapping[str, Any]] = {
    "precision": {"bf16": False, "fp16": False},
    "activation_checkpointing": {"activation_checkpointing": False},
    "compile": {"torch_compile": False},
    "kernels": {"use_liger_kernel": False},
}


def trainer_case(source: ExportSource) -> TrainerCase:
    """The config as `trainer` reads it; flash-attn is taken to be there if it was when this was measured."""
    flash_attn = "flash-attn" in source.versions
    return TrainerCase(source.config, source.device, source.task, source.effective_batch_size, flash_attn)


def keywords(request: Request, knob: str) -> TrainerKeywords:
    """What Trainer, from_pretrained, LoraConfig and BitsAndBytesConfig are given for one knob."""
    return TRAINER_KNOBS[knob](trainer_case(request.source))


def arguments(knob: str, prefix: str = "") -> Share:
    """The keys of a knob that TrainingArguments alone hold."""

    def share(request: Request) -> ToolKeys:
        trainer = keywords(request, knob)
        values = {**_OFF.get(knob, {}), **trainer.arguments}
        return ToolKeys({f"{prefix}{name}": value for name, value in values.items()}, trainer.deviations)

    return share


def trainer_arguments(*knobs: str, prefix: str = "") -> dict[str, Share]:
    """The rows of knobs that TrainingArguments alone hold."""
    return {knob: arguments(knob, prefix) for knob in knobs}


def attention(prefix: str = "") -> Share:
    """The keys of `attention`, an argument of from_pretrained."""

    def share(request: Request) -> ToolKeys:
        trainer = keywords(request, "attention")
        implementation = trainer.model.get("attn_implementation", "sdpa")
        return ToolKeys({f"{prefix}attn_implementation": implementation}, trainer.deviations)

    return share


def named_before(keys: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments by their names before RENAMED."""
    return {name.replace("activation_checkpointing", "gradient_checkpointing"): each for name, each in keys.items()}


def batches_fit(source: ExportSource) -> str | None:
    """For `refuse`: what is wrong with the batch sizes, or None."""
    try:
        batch_sizes(trainer_case(source))
    except InputError as error:
        return error.message
    return None
