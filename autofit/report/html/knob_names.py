"""A config as a table in words: what each knob that is on does, for readers who do not know the
knobs' names."""

from collections.abc import Mapping
from typing import Any

from autofit.core.errors import pluralize
from autofit.core.knobs import is_off, knob_named
from autofit.core.knobs.activation_checkpointing import BUDGET
from autofit.core.layout import implied
from autofit.core.some_blocks import SomeBlocks
from autofit.report.formatting import value

KnobRow = tuple[str, str, str]  # a title, what it means, and the knob as YAML has it


def config_rows(config: Mapping[str, Any]) -> list[KnobRow]:
    """Every knob that is on, in the order of the config; training all weights has a row, too."""
    left_out = {*off_knobs(config), *implied(config)}
    shown = [name for name in config if name not in left_out]

    return [_row(config, name) for name in shown if knob_named(name).has_row]


def off_knobs(config: Mapping[str, Any]) -> list[str]:
    """The knobs that do nothing; `loss: standard` and `lora_rank: 0` have words of their own, and
    count as on."""
    names = []
    for name, given in config.items():
        knob = knob_named(name)
        if is_off(given) and knob.has_row and knob.off not in knob.words:
            names.append(knob.name)

    return names


def _row(config: Mapping[str, Any], name: str) -> KnobRow:
    """A knob that is on: its title, what its value does, and the knob as YAML has it."""
    given: Any = config.get(name)
    knob = knob_named(name)
    title = knob.title or name.replace("_", " ").capitalize()
    words = knob.words.get(given, value(given))
    setting = f"{name}: {value(given)}"

    if name == "micro_batch_size":
        times = config.get("gradient_accumulation_steps") or 1
        how = "the whole batch"
        if times > 1:
            how = f"{times} times for each update"
        words = f"{pluralize(given, 'sample')} at a time, {how}"
        setting += f", gradient_accumulation_steps: {times}"

    elif name == "lora_rank" and given:
        targets = str(config.get("lora_targets"))
        where = targets.replace("all-linear+head", "all linear layers and the head")
        where = where.replace("all-linear", "all linear layers")
        words = f"LoRA adapters of rank {given} on {where}"
        setting += f", lora_targets: {value(config.get('lora_targets'))}"

    elif name == "lora_rank" and config.get("head_only"):
        words = knob_named("head_only").words[True]

    elif str(given).startswith(BUDGET):
        share = float(str(given).removeprefix(BUDGET))
        words = f"the compiler keeps about {share:.0%} of the activations"

    elif some := SomeBlocks.of(given):
        which = knob_named(name).of_blocks.format(pluralize(some.number, "block"))
        words = f"{some.value}, {which}"
        if some.rest != "none":
            words += f"; the rest {some.rest}"

    return title, words, setting
