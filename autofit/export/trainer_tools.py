"""What tools that are built on transformers' Trainer have in common: knobs told in Trainer's own arguments.

`trainer` holds the mapping; here it becomes a tool's share of each knob, off values written out, because the defaults
of these tools differ: TRL and LLaMA-Factory checkpoint unless told not to, TRL loads weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autofit.core.errors import InputError
from autofit.export.deviation import Deviation
from autofit.export.source import ExportSource
from autofit.export.tool import Request, ToolKeys
from autofit.export.trainer import TRAINER_KNOBS, TrainerCase, TrainerKeywords, batch_sizes

Share = Callable[[Request], ToolKeys]
RENAMED = "5.23.0"  # of transformers, where gradient_checkpointing became activation_checkpointing
OFFLOADS = "5.17.0"  # of transformers, where checkpointing got an option to offload
OFF: Mapping[str, Mapping[str, Any]] = {
    "precision": {"bf16": False, "fp16": False},
    "activation_checkpointing": {"activation_checkpointing": False},
    "compile": {"torch_compile": False},
    "kernels": {"use_liger_kernel": False},
}


def trainer_case(request: Request) -> TrainerCase:
    """The config as `trainer` wants it; flash-attn is taken to be where it was when this was measured."""
    found = request.found
    return TrainerCase(
        config=request.config,
        device=found.device,
        task=found.task,
        effective_batch_size=found.effective_batch_size,
        flash_attn="flash-attn" in found.versions,
    )


def keywords(request: Request, knob: str) -> TrainerKeywords:
    """What Trainer, from_pretrained, LoraConfig and BitsAndBytesConfig are told of one knob."""
    return TRAINER_KNOBS[knob](trainer_case(request))


def arguments(knob: str) -> Share:
    """The share of a knob that is told in TrainingArguments alone."""

    def share(request: Request) -> ToolKeys:
        said = keywords(request, knob)
        return ToolKeys({**OFF.get(knob, {}), **said.arguments}, said.departures)

    return share


def named_before(keys: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments by their names before RENAMED."""
    return {name.replace("activation_checkpointing", "gradient_checkpointing"): each for name, each in keys.items()}


def unknown(knob: str, instead: str, *, may_not_fit: bool = True) -> Share:
    """The share of a knob that the tool has nothing for; `instead` is what it does."""

    def share(request: Request) -> ToolKeys:
        off = request.found.off.get(knob)
        return (
            ToolKeys()
            if request.config[knob] in (None, off)
            else ToolKeys({}, (request.departs(knob, instead, may_not_fit=may_not_fit),))
        )

    return share


def batches_fit(found: ExportSource) -> str | None:
    """For `refuse`: what is wrong with the batch sizes, or None."""
    try:
        batch_sizes(trainer_case(Request(found, "")))
    except InputError as error:
        return error.message
    return None


def lora_alpha(request: Request) -> float:
    """The scale of adapters, worked out where the config holds null."""
    return request.config["lora_alpha"] or 2 * int(request.config["lora_rank"] or 0)  # type: ignore[return-value]


def rounded_alpha(request: Request, title: str) -> tuple[int, tuple[Deviation, ...]]:
    """The scale for a tool that takes whole numbers only, and what is lost by that."""
    alpha = lora_alpha(request)
    whole = max(1, round(alpha))
    lost = request.departs("lora_alpha", f"{title} takes whole numbers, here {whole}")
    return whole, () if whole == alpha else (lost,)


def whole_alpha(title: str) -> Share:
    """The share of `lora_alpha` for such a tool."""

    def share(request: Request) -> ToolKeys:
        if not request.config["lora_rank"]:
            return ToolKeys()
        whole, lost = rounded_alpha(request, title)
        return ToolKeys({"lora_alpha": whole}, lost)

    return share


def lora_dropout(request: Request) -> ToolKeys:
    """The share of `lora_dropout`, written out as 0 where adapters have none."""
    return ToolKeys({"lora_dropout": request.config["lora_dropout"] or 0.0} if request.config["lora_rank"] else {})
