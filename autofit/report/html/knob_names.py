"""A config as a table in words: what each knob that is on does, for readers who do not know the knobs' names."""

from collections.abc import Mapping
from typing import Any

from autofit.core.errors import pluralize
from autofit.core.knobs import is_off, knob_named
from autofit.core.knobs.activation_checkpointing import BUDGET
from autofit.core.layout import implied
from autofit.report.formatting import value

KnobRow = tuple[str, str, str]  # a title, what it means, and the knob as YAML has it


def config_rows(config: Mapping[str, Any]) -> list[KnobRow]:
    """Every knob that is on, in the order of the config; training all weights has a row, too."""
    told = {*off_knobs(config), *implied(config)}
    return [_row(config, knob) for knob in config if knob not in told and knob_named(knob).has_row]


def off_knobs(config: Mapping[str, Any]) -> list[str]:
    """The knobs that do nothing; `loss: standard` and `lora_rank: 0` have words of their own, and count as on."""
    off = (knob_named(name) for name, given in config.items() if is_off(given))
    return [knob.name for knob in off if knob.has_row and knob.off not in knob.words]


def _row(config: Mapping[str, Any], knob: str) -> KnobRow:
    given: Any = config.get(knob)
    record = knob_named(knob)
    title = record.title or knob.replace("_", " ").capitalize()
    words, parts = record.words.get(given, value(given)), [knob]
    if knob == "micro_batch_size":
        times = config.get("gradient_accumulation_steps") or 1
        parts.append("gradient_accumulation_steps")
        words = f"{pluralize(given, 'sample')} at a time, "
        words += f"{times} times for each update" if times > 1 else "the whole batch"
    elif knob == "lora_rank":
        if config.get("head_only"):
            words = knob_named("head_only").words[True]
        if given:
            parts.append("lora_targets")
            targets = str(config.get("lora_targets")).replace(
                "all-linear+head", "all linear layers and the head"
            )
            words = f"LoRA adapters of rank {given} on {targets.replace('all-linear', 'all linear layers')}"
    elif str(given).startswith(BUDGET):
        words = f"the compiler keeps about {float(str(given).removeprefix(BUDGET)):.0%} of the activations"
    return title, words, ", ".join(f"{part}: {value(config.get(part, 1))}" for part in parts)
