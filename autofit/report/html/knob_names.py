"""A config as a table in words: what each knob that is on does, for readers who do not know the knobs' names."""

from collections.abc import Mapping
from typing import Any

from autofit.core.errors import counted
from autofit.core.knobs import KNOB_WORDS, KnobWords, is_off
from autofit.core.layout import implied
from autofit.report.formatting import value

_PART_OF_OTHERS = ("gradient_accumulation_steps", "lora_targets", "lora_alpha", "lora_dropout", "lora_plus")
KnobRow = tuple[str, str, str]  # a title, what it means, and the knob as YAML has it


def config_rows(config: Mapping[str, Any]) -> list[KnobRow]:
    """Every knob that is on, in the order of the config; training all weights has a row, too."""
    told = {*_PART_OF_OTHERS, *off_knobs(config), *implied(config)}
    return [_row(config, knob) for knob in config if knob not in told]


def off_knobs(config: Mapping[str, Any]) -> list[str]:
    """The knobs that do nothing; `loss: standard` and `lora_rank: 0` have words of their own, and count as on."""
    worded = ("lora_rank", *_PART_OF_OTHERS)
    return [knob for knob, given in config.items() if knob not in worded and is_off(given) and given != "standard"]


def _row(config: Mapping[str, Any], knob: str) -> KnobRow:
    given: Any = config.get(knob)
    title = KNOB_WORDS.get(knob, KnobWords(knob.replace("_", " ").capitalize(), ""))
    words, parts = title.values.get(given, value(given)), [knob]
    if knob == "micro_batch_size":
        times = config.get("gradient_accumulation_steps") or 1
        parts.append("gradient_accumulation_steps")
        words = f"{counted(given, 'sample')} at a time, "
        words += f"{times} times for each update" if times > 1 else "the whole batch"
    elif knob == "lora_rank":
        words = "the output layer alone" if config.get("head_only") else "all weights"
        if given:
            parts.append("lora_targets")
            targets = str(config.get("lora_targets")).replace("all-linear+head", "all linear layers and the head")
            words = f"LoRA adapters of rank {given} on {targets.replace('all-linear', 'all linear layers')}"
    elif str(given).startswith("budget-"):
        words = f"the compiler keeps about {float(str(given).removeprefix('budget-')):.0%} of the activations"
    return title.title, words, ", ".join(f"{part}: {value(config.get(part, 1))}" for part in parts)
