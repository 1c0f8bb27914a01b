"""What the techniques offer to a search of a workload on some hardware: knobs, values, and the configs of a space."""

from __future__ import annotations

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.search import KnobChoices, Space, load_space


def knob_choices(workload: Workload, hardware: Hardware) -> KnobChoices:
    """What the techniques offer to a search of this workload on this hardware."""

    def choices(knob: str) -> tuple[Value, ...]:
        return techniques.technique_named(knob).choices_for(workload, hardware)

    return KnobChoices(
        known=tuple(each.name for each in techniques.all_techniques() if choices(each.name)),
        choices=choices,
        accepts=lambda knob, value: techniques.technique_named(knob).accepts(value, hardware),
    )


def legal_configs(options: SearchOptions, workload: Workload, hardware: Hardware) -> list[Config]:
    """The configs that a search with these options would choose from."""
    return list(
        space_for(options, workload, hardware).configs(techniques.constraints(workload, hardware), options.seed)
    )


def space_for(options: SearchOptions, workload: Workload, hardware: Hardware) -> Space:
    """The space asked for; the default is everything for causal language models, full training otherwise."""
    offer = knob_choices(workload, hardware)
    default = "everything" if workload.task == "causal-lm" else "full"
    return load_space(options.space or default, offer).with_overrides(options.set, offer)
