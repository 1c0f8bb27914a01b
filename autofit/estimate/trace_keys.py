"""Which Configs of a space share what: a group of them the pieces, a pass the traces that it is put together from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.core.config import Config, Value
from autofit.estimate.scaling import Symbols
from autofit.estimate.shallow_model import Depth

_SAME = {
    "precision": {"tf32": "fp32", "fp16-mixed": "bf16-mixed"},
}
_SAME_WORK = {"quantization": {"nf4-dq": "nf4"}}  # and but for the bytes of weights
_LEFT_OUT = {  # knobs that the pieces are put together by, and what is traced in their place
    "optimizer": "sgd",  # the one with the least operators
    "optimizer_offload": "none",
    "optimizer_in_backward": False,
    "activation_offload": "none",
    "parameter_offload": "none",
    "compile": "none",
}
_SCALED = frozenset(("micro_batch_size", "gradient_accumulation_steps", "lora_rank", "lora_alpha"))
BUDGET = "budget-"


def group_key(config: Config) -> tuple[Value, ...]:
    """Tells the configs of one group from others: making a Config for each of hundreds of thousands takes seconds."""
    return bool(config["lora_rank"]), *(value for knob, value in config.items() if knob not in _SCALED)


def group_of(config: Config) -> Config:
    """What a config has in common with others of the same pieces: all but the micro-batch and the rank."""
    return config.replace(
        micro_batch_size=0,
        gradient_accumulation_steps=0,
        lora_rank=min(1, int(config["lora_rank"] or 0)),
        lora_alpha=None,
    )


def of_pass(config: Mapping[str, Value]) -> Config:
    """What a config's forward and backward depend on."""
    return Config({**config, **{knob: value for knob, value in _LEFT_OUT.items() if knob in config}})


def ends_of(config: Config) -> list[Config]:
    """The configs whose steps tell a config's own: of one that recomputes within a budget, all and nothing."""
    if not str(config["activation_checkpointing"]).startswith(BUDGET):
        return [config]
    return [config.replace(activation_checkpointing=each) for each in ("full", "none")]


def plain_key(config: Config, symbols: Symbols) -> Config:
    """What is traced for a config's blocks without checkpointing, its weights held as it says."""
    given = {"loss": "standard", "activation_checkpointing": "none", "attention": "sdpa", "kernels": "none"}
    return trace_key(config, symbols, as_held=True, **given)


def other_keys(config: Config, symbols: Symbols, depth: Depth | None, *, by_flash: bool) -> tuple[Config, ...]:
    """What is traced for a pass beside its plain blocks: the whole where those have no `depth`, or the head, then the
    blocks as they are, of two kinds where every second one is checkpointed.

    `by_flash`: PyTorch computes the attention of the plain blocks by flash, so that asking for it changes nothing.
    """
    if by_flash and config["attention"] == "flash":
        config = config.replace(attention="sdpa")
    if depth is None:
        return (trace_key(config, symbols),)
    # Which layers are quantised makes no difference to the head: it never is.
    head = trace_key(config, symbols, activation_checkpointing="none", attention="sdpa", quantization="none")
    if config["activation_checkpointing"] == "alternate" and depth.period == 1:
        kinds = [
            trace_key(config, symbols, loss="standard", activation_checkpointing=each) for each in ("none", "full")
        ]
        return head, *kinds
    return head, trace_key(config, symbols, loss="standard")


def trace_key(config: Config, symbols: Symbols, *, as_held: bool = False, **other: Value) -> Config:
    """What is traced for a config; `as_held`: also where only the weights' own bytes tell it from others."""
    given: dict[str, Any] = dict(config)
    for knob, same in (_SAME if as_held else {**_SAME, **_SAME_WORK}).items():
        given[knob] = same.get(str(given.get(knob)), given.get(knob))
    return of_pass(given).replace(
        micro_batch_size=symbols.samples,
        gradient_accumulation_steps=1,
        lora_rank=symbols.rank if config["lora_rank"] else 0,
        lora_alpha=None,
        **other,
    )
