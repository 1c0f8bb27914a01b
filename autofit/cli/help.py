"""`--help` of a command: what typer shows, then the knobs where there is a `--set`."""

from typing import Any

from rich.table import Table
from typer.core import TyperCommand

from autofit.core.knobs import SETTABLE
from autofit.report.terminal import Terminal


class PlainFlags:
    """Hides the type that typer shows beside flags, as if they took a value.

    As a base it goes before typer's own class.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]

        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""

        return parameters


class Command(PlainFlags, TyperCommand):
    """A command whose help lists the values of `--set`, for which its option has no room."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)

        if any("--set" in parameter.opts for parameter in self.params):
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for knob in SETTABLE.values():
                table.add_row(f"   {knob.name}", knob.description)
            Terminal().print(" Knobs of --set:", table, sep="\n")
