"""What all commands have that typer's lack: `--help` with the knobs, and an error where the value of
an option was forgotten."""

from itertools import pairwise, takewhile
from typing import Any

from rich.table import Table
from typer.core import TyperCommand

from autofit.core.errors import InputError
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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that would be taken for the value of the one before it."""
        takes_value = {}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option":
                for name in (*parameter.opts, *parameter.secondary_opts):
                    takes_value[name] = not parameter.is_flag

        options = takewhile(lambda word: word != "--", args)
        for option, following in pairwise(options):
            if takes_value.get(option) and following in takes_value:
                raise InputError(
                    f"{option} lacks its value: {following} is an option, too.",
                    f"Give it one; if that is meant, write {option}={following}.",
                )
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)

        if any("--set" in parameter.opts for parameter in self.params):
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for knob in SETTABLE.values():
                table.add_row(f"   {knob.name}", knob.description)
            Terminal().print(" Knobs of --set:", table, sep="\n")
