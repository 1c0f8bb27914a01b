"""An option of a command: its help, the group it is shown in, and how a shell completes it."""

from typing import Any

import typer

# The groups of `--help`
MODEL = "Model"
BUDGET = "Budget"
SPACE = "Search space"
CONFIG = "Config"
GENERATION = "Generation"
SEARCH = "Search"
DATA = "Weights and data"
LEARNING = "Learning"
RUN = "Run"
OUTPUT = "Output"


def option(group: str, text: str, metavar: str | None, *names: str, complete: Any = None) -> Any:
    """`complete` holds the words that a shell offers, or is a function that finds them."""
    offer = (lambda: list(complete)) if isinstance(complete, tuple) else complete

    return typer.Option(
        *names,
        help=text,
        rich_help_panel=group,
        metavar=metavar,
        autocompletion=offer,
    )
