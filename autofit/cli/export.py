"""What is made of a search that has ended: `autofit export` and `autofit report`."""

from __future__ import annotations

from rich.console import Console

from autofit.cli.options import (
    ExportOutput,
    Format,
    Json,
    ReportOutput,
    ResultOrNone,
    Runs,
    Strict,
    Tool,
    ToolVersion,
)
from autofit.cli.output import heavy, print_json, print_list
from autofit.core.errors import InputError
from autofit.export.tools import describe_tools
from autofit.report import tools_table


def export(
    result: ResultOrNone = None,
    to: Tool = "list",
    output: ExportOutput = None,
    strict: Strict = False,
    tool_version: ToolVersion = None,
    as_json: Json = False,
) -> int:
    """Write the config of a result for another training tool.

    Examples:
      autofit export run/result.yaml --to axolotl --output axolotl.yaml
      autofit export --to list
    """
    if to == "list":
        return print_list("tools", describe_tools(), tools_table, as_json)
    if result is None:
        raise InputError("there is nothing to export.", "Give a RESULT.yaml.")
    made = heavy("autofit.export.from_result", "export")(
        result, to=to, output=output, strict=strict, tool_version=tool_version
    )
    if as_json:
        print_json(made.to_json())
    else:
        print("" if output else made.text, end="")
        Console(stderr=True, soft_wrap=True).print(made.message, end="", markup=False, highlight=False)
    return 0


def report(runs: Runs, form: Format = None, output: ReportOutput = None) -> int:
    """Write the report of a search again, its pictures or a summary; or compare two searches.

    Examples:
      autofit report run
      autofit report run --format md
      autofit report run other-run
    """
    told = heavy("autofit.report.run_report", "report")(runs, form, output)
    print(told) if isinstance(told, str) else Console().print(told)
    return 0
