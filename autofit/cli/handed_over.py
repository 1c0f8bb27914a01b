"""What is made of a search that has ended: `autofit export` and `autofit report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autofit.cli.options import Json
from autofit.cli.output import heavy, print_json, print_list
from autofit.core.errors import InputError
from autofit.export.tools import describe_tools
from autofit.report import tools_table


def export(
    result: Annotated[Path | None, typer.Argument(metavar="RESULT.yaml")] = None,
    to: Annotated[str, typer.Option(metavar="TOOL", help="Such as axolotl; list: all of them.")] = "list",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; default: stdout.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where the tool would run another config.")] = False,
    tool_version: Annotated[str | None, typer.Option(metavar="V", help="Of the tool; default: the newest.")] = None,
    as_json: Json = False,
) -> int:
    """Write the config of a result for another training tool."""
    if to == "list":
        return print_list("tools", describe_tools(), tools_table, as_json)
    if result is None:
        raise InputError("there is nothing to export.", "Give a RESULT.yaml.")
    made = heavy("autofit.exports", "export")(result, to=to, output=output, strict=strict, tool_version=tool_version)
    if as_json:
        print_json(made.to_json())
    else:
        print("" if output else made.text, end="")
        Console(stderr=True, soft_wrap=True).print(made.told, end="", markup=False, highlight=False)
    return 0


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR [RUN_DIR]", help="A run; two are compared.")],
    form: Annotated[
        str | None, typer.Option("--format", help="html, svg, png or md; of two runs a table, or md.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: in RUN_DIR; md: stdout.")] = None,
) -> int:
    """Write the report of a search again, its pictures or a summary; or tell two searches apart."""
    told = heavy("autofit.report.run_report", "report")(runs, form, output)
    print(told) if isinstance(told, str) else Console().print(told)
    return 0
