"""A config as a table in words: what each knob that is on does, for who does not know the knobs' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import counted
from autofit.core.knobs import KNOB_WORDS, KnobWords, is_off
from autofit.report.formatting import value

_BESIDE_OTHERS = ("gradient_accumulation_steps", "lora_targets", "lora_alpha", "lora_dropout")


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
    """`loss: standard` and `lora_rank: 0` have words of their own, and count as on."""
    return is_off(config[knob]) and config[knob] != "standard" and knob != "lora_rank"


def _row(config: Mapping[str, Any], knob: str) -> Row:
    given = config[knob]
    written = f"{knob}: {value(given)}"
    known = KNOB_WORDS.get(knob, KnobWords(knob.replace("_", " ").capitalize(), ""))
    words = known.values.get(given)
    if knob == "micro_batch_size":
        words, written = _batch(config)
    elif knob == "lora_rank":
        words, written = _lora(config)
    elif words is None and str(given).startswith("budget-"):
        words = f"the compiler keeps about {float(str(given).removeprefix('budget-')):.0%} of the activations"
    return Row(known.title, words or value(given), written)


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
