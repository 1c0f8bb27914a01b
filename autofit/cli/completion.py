"""What a shell offers when Tab is pressed: the names that options take. None of it loads torch.

typer itself leaves out what does not begin with what was typed.
"""

from __future__ import annotations

from autofit.cli.knobs_of_set import known_knobs
from autofit.cli.output import heavy
from autofit.core.workload import SCHEDULES
from autofit.export.tools import describe_tools
from autofit.hardware.catalogue import card_names
from autofit.models import describe_presets
from autofit.report.formatting import value

Offered = list[tuple[str, str]]  # what is written, and what it means


def models() -> Offered:
    """The presets; directories are the shell's own business."""
    return [(each["name"], each["task"]) for each in describe_presets()]


def spaces() -> Offered:
    """The spaces that ship with autofit."""
    return [(each.name, each.description) for each in heavy("autofit.search", "list_spaces")()]


def cards() -> list[str]:
    """The cards of the catalogue."""
    return card_names()


def cards_and_list() -> list[str]:
    """The cards, and the word for all of them."""
    return ["list", *card_names()]


def devices() -> list[str]:
    """What can be computed on."""
    return ["cpu", "cuda"]


def tools() -> Offered:
    """The tools that configs are exported to."""
    return [("list", "all tools"), *((each["name"], each["title"]) for each in describe_tools())]


def schedules() -> list[str]:
    """Of the learning rate."""
    return list(SCHEDULES)


def formats() -> list[str]:
    """What a report is written as."""
    return list(heavy("autofit.report.run_report", "FORMATS"))


def settings(incomplete: str) -> list[str]:
    """KNOB=, and once that is written its values."""
    name, equals, _ = incomplete.partition("=")
    values = {each.name: each.values for each in known_knobs()}
    if not equals:
        return [f"{each}=" for each in values]
    return [f"{name}={value(each)}" for each in values.get(name, ())]
