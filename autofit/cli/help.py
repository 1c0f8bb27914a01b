"""`--help` of a command: what typer shows, and the knobs after it where there is a `--set`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from autofit.cli.knobs_of_set import known_knobs


class PlainFlags:
    """Flags without the type that typer shows beside them, as if they took a value. Goes before typer's own class."""

    def get_params(self, ctx: Any) -> list[Any]:
        every: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in every:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return every


class Command(PlainFlags, TyperCommand):
    """A command whose help lists the values of `--set`, which options have no room for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if any("--set" in each.opts for each in self.params):
            Console().print(" Knobs of --set:", _knobs_table(), sep="\n")


def _knobs_table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in known_knobs():
        table.add_row(f"   {each.name}", each.told)
    return table
