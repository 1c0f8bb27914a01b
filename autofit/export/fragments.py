"""What every knob adds to the emitted script. A new technique adds its lines here: one function and one row of KNOBS.

A knob that is off adds nothing. A value that has no row is refused by `script`, never left out in silence: the figures
in the head of the script would be those of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autofit.core.config import Config, Value


@dataclass(frozen=True)
class Fragments:
    """Lines for the places of the script that knobs may change.

    `settings` are arguments of from_pretrained and from_config; `adapt` changes the loaded model; `forward` is the
    context that surrounds the forward pass; `input_dtype` what floating inputs are cast to; `scaler` makes a loss
    scaler; `start` runs before anything is loaded; `save` replaces the plain saving.
    """

    imports: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    adapt: tuple[str, ...] = ()
    forward: str | None = None
    input_dtype: str | None = None
    scaler: str | None = None
    start: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    held: str | None = None  # how the weights are held, in words
    optimizer: tuple[str, str] | None = None  # what it is in words, and the call that makes it

    def joined(self, other: Fragments) -> Fragments:
        """Both together: lines one after the other, single things from whoever has them."""
        merged: dict[str, Any] = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "settings":
                merged[each.name] = {**mine, **theirs}
            elif each.name in ("imports", "adapt", "start", "save"):
                merged[each.name] = mine + theirs
            else:
                merged[each.name] = mine or theirs
        return Fragments(**merged)


def _precision(config: Config, task: str) -> Fragments | None:
    """Weights, arithmetic and loss scaler by DESIGN section 4; frozen weights are what LoRA leaves untrained."""
    value, lora = config.get("precision", "fp32"), bool(config.get("lora_rank"))
    if value == "fp32":
        return Fragments(settings={"dtype": "torch.float32"}, held="all weights in float32")
    if value == "bf16":
        dtype = "torch.bfloat16"
        return Fragments(settings={"dtype": dtype}, input_dtype=dtype, held="all weights in bfloat16")
    if value not in ("bf16-mixed", "fp16-mixed"):
        return None
    half = "bfloat16" if value == "bf16-mixed" else "float16"
    return Fragments(
        settings={"dtype": f"torch.{half}" if lora else "torch.float32"},
        forward=f"torch.autocast(DEVICE, dtype=torch.{half})",
        scaler="torch.amp.GradScaler(DEVICE)" if half == "float16" else None,
        held=f"frozen weights in {half}, trained ones in float32" if lora else "all weights in float32",
    )


def _attention(config: Config, task: str) -> Fragments | None:
    value = config.get("attention", "sdpa")
    if value == "sdpa":  # what transformers takes by itself
        return Fragments()
    return Fragments(settings={"attn_implementation": '"eager"'}) if value == "eager" else None


_HEADS = (
    "# The new head of a classifier starts from random weights: it is trained whole.",
    "heads = [",
    "    name",
    "    for name, module in model.named_children()",
    '    if name in ("score", "classifier") and isinstance(module, torch.nn.Linear)',
    "]",
)
_TARGETS = (
    "targets = [",
    "    name",
    "    for name, module in model.named_modules()",
    '    if type(module).__name__ in ("Linear", "Conv1D")',  # Conv1D: GPT-2's transposed Linear
)


def _lora(config: Config, task: str) -> Fragments | None:
    """peft's LoRA with alpha = 2 x rank and no dropout, the adapters in the dtype that `precision` trains in."""
    rank, targets = config.get("lora_rank"), config.get("lora_targets")
    if not rank:
        return Fragments()
    classifier = task.endswith("classification")
    heads, condition = (_HEADS, "name not in heads") if classifier else ((), "")
    named = "targets"
    if targets == "attention":
        condition = '("attn" in name or "attention" in name)'
    elif targets == "all-linear+head":
        heads, condition = (), ""
    elif targets != "all-linear":
        return None
    elif not classifier:
        named = '"all-linear"'  # peft leaves out the output embedding by itself
    listed = () if named != "targets" else (*_TARGETS, *((f"    and {condition}",) if condition else ()), "]")
    in_float32 = str(config.get("precision")).endswith("-mixed") and bool(heads)
    keep = ", autocast_adapter_dtype=False" if config.get("precision") == "bf16" else ""
    return Fragments(
        imports=("from peft import LoraConfig, get_peft_model",),
        adapt=(
            *heads,
            *listed,
            "lora = LoraConfig(",
            f"    r={rank},",
            f"    lora_alpha={2 * int(rank)},",
            "    lora_dropout=0.0,",
            f"    target_modules={named},",
            *(("    modules_to_save=heads,",) if heads else ()),
            ")",
            f"model = get_peft_model(model, lora{keep})",
            *(_TRAINED_IN_FLOAT32 if in_float32 else ()),
        ),
        save=(
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        ),
    )


_TRAINED_IN_FLOAT32 = (
    "for parameter in model.parameters():",
    "    if parameter.requires_grad:",
    "        parameter.data = parameter.data.float()",
)


def _activation_checkpointing(config: Config, task: str) -> Fragments | None:
    value = config.get("activation_checkpointing", "none")
    if value == "none":
        return Fragments()
    if value != "full":
        return None
    return Fragments(
        adapt=(
            "# Each block keeps only its input and computes the rest again in the backward pass.",
            'if hasattr(model, "activation_checkpointing_enable"):',
            '    model.activation_checkpointing_enable({"use_reentrant": False})',
            "else:  # its name in older transformers",
            '    model.gradient_checkpointing_enable({"use_reentrant": False})',
        )
    )


_OPTIMIZERS = {
    "adamw": ("Fused AdamW", "torch.optim.AdamW(groups, lr=lr, fused=True)", ()),
    "adamw-foreach": ("AdamW", "torch.optim.AdamW(groups, lr=lr, foreach=True)", ()),
    "adamw-8bit": (
        "AdamW with 8-bit state",
        "AdamW8bit(groups, lr=lr)",
        ("from bitsandbytes.optim import AdamW8bit",),
    ),
    "sgd": ("Plain SGD", "torch.optim.SGD(groups, lr=lr)", ()),
}


def _optimizer(config: Config, task: str) -> Fragments | None:
    found = _OPTIMIZERS.get(str(config.get("optimizer", "adamw")))
    return Fragments(imports=found[2], optimizer=(found[0], found[1])) if found else None


def _elsewhere(config: Config, task: str) -> Fragments:
    """For knobs that the script's constants, or another knob's function, take care of."""
    return Fragments()


KNOBS: dict[str, Callable[[Config, str], Fragments | None]] = {
    "micro_batch_size": _elsewhere,
    "gradient_accumulation_steps": _elsewhere,
    "precision": _precision,
    "attention": _attention,
    "lora_rank": _lora,
    "lora_targets": _elsewhere,
    "activation_checkpointing": _activation_checkpointing,
    "optimizer": _optimizer,
}


def is_off(value: Value) -> bool:
    """Whether a knob unknown here changes nothing, by the names that `off` goes by."""
    return value in (None, False, 0, "none", "standard")
