"""What a shell offers when Tab is pressed, found without torch.

Typer leaves out what does not begin as typed.
"""

from autofit.cli.output import heavy
from autofit.core.knobs import SETTABLE, yaml_word
from autofit.export.tools import describe_tools
from autofit.hardware.catalogue import card_names
from autofit.models import describe_presets

Choices = list[tuple[str, str]]  # a word, and what it means


def models() -> Choices:
    """The presets; directories are the shell's own business."""
    return [(preset["name"], preset["task"]) for preset in describe_presets()]


def spaces() -> Choices:
    """The spaces that ship with autofit."""
    list_spaces = heavy("autofit.search.space", "list_spaces")
    return [(space.name, space.description) for space in list_spaces()]


def cards_and_list() -> list[str]:
    """The cards of the catalogue, and the word for all of them."""
    return ["list", *card_names()]


def tools() -> Choices:
    """The tools that configs are exported to."""
    return [("list", "all tools"), *((tool["name"], tool["title"]) for tool in describe_tools())]


def formats() -> list[str]:
    """The formats of a report."""
    return list(heavy("autofit.report.run_report", "FORMATS"))


def settings(incomplete: str) -> list[str]:
    """KNOB=, and once that is written its values."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{knob}=" for knob in SETTABLE]
    values = SETTABLE[name].values if name in SETTABLE else ()
    return [f"{name}={yaml_word(value)}" for value in values]
