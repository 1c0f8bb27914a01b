"""The space of a search: the knobs and values that techniques offer a workload on some hardware."""

from autofit import techniques
from autofit.core.capacity import smallest_rank
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.options import SearchOptions
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.export.from_result import ANY
from autofit.search import space
from autofit.search.space import KnobChoices, Space, list_spaces, load_space
from autofit.setup import Technique


def knob_choices(workload: Workload, hardware: Hardware) -> KnobChoices:
    """The knobs and values that the techniques offer this workload on this hardware."""
    choices = {}
    possible = {}
    named = {}
    for technique in techniques.all_techniques():
        worth = technique.choices_for(workload, hardware)
        choices[technique.name] = worth
        possible[technique.name] = tuple(dict.fromkeys((*worth, *technique.choices(hardware))))
        if technique.pattern:
            named[technique.name] = technique.values

    return KnobChoices(
        known=tuple(name for name, values in choices.items() if values),
        choices=choices.__getitem__,
        check=lambda knob, value: techniques.check({knob: value}, hardware),
        possible=possible.__getitem__,
        named=named,
    )


def check_asked(options: SearchOptions) -> None:
    """Raise the InputErrors of `space_for` that depend on no hardware, before a search looks for
    any."""
    names = []
    knobs = {}
    for technique in techniques.all_techniques():
        names.append(technique.name)
        is_plain = type(technique).accepts is Technique.accepts
        if is_plain and (technique.values or technique.numbers):
            knobs[technique.name] = technique.knob(ANY)

    space.check_asked(options.space, options.set, tuple(names), knobs)


def legal_configs(options: SearchOptions, workload: Workload, hardware: Hardware) -> list[Config]:
    """The configs that a search with these options would choose from."""
    constraints = techniques.constraints(workload, hardware)
    return list(space_for(options, workload, hardware).configs(constraints, options.seed))


def space_for(options: SearchOptions, workload: Workload, hardware: Hardware) -> Space:
    """The space asked for.

    The default is everything for causal language models, full training otherwise. Where the data
    are known, our own spaces hold the smallest rank of LoRA that suffices for them.
    """
    choices = knob_choices(workload, hardware)
    default = "everything" if TASKS[workload.task].of_language_models else "full"
    name = options.space or default
    found = load_space(name, choices)

    rank = smallest_rank(workload)
    ranks = found.knobs.get("lora_rank")
    if rank and ranks and name in {file.name for file in list_spaces()}:
        fitting = [old and rank for old in ranks]  # 0 stays, which trains all weights
        found = found.with_overrides({"lora_rank": fitting}, choices)

    return found.with_overrides(options.set, choices)
