"""`autofit export`."""

import autofit.cli.options as options
from autofit.cli.output import heavy, print_answer, print_json
from autofit.core.errors import InputError
from autofit.core.files import check_writable
from autofit.core.result import SavedResult
from autofit.export.tools import describe_tools, tool_named
from autofit.models import named_by
from autofit.report.listings import tools_table
from autofit.report.terminal import Terminal


def export(
    result: options.ResultOrNone = None,
    to: options.Tool = "list",
    output: options.ExportOutput = None,
    strict: options.Strict = False,
    tool_version: options.ToolVersion = None,
    as_json: options.Json = False,
) -> int:
    """Write the config of a result for another training tool.

    Examples:
      autofit export run/result.yaml --to axolotl --output axolotl.yaml
      autofit export --to list
    """
    if to == "list":
        rows = describe_tools()
        return print_answer({"schema": 1, "tools": rows}, tools_table(rows), as_json)
    if result is None:
        raise InputError("there is nothing to export.", "Give a RESULT.yaml.")

    tool_named(to).schema(tool_version)
    named_by(SavedResult.load(result).source)
    if output is not None:
        check_writable(output, folder=False, remedy="Choose another --output.")

    exported = heavy("autofit.export.from_result", "export")(
        result,
        to=to,
        output=output,
        strict=strict,
        tool_version=tool_version,
    )
    if as_json:
        print_json(exported.to_json())
        return 0

    if output is None:
        print(exported.text, end="")
    stderr = Terminal(stderr=True, soft_wrap=True)
    stderr.print(exported.message, end="", markup=False, highlight=False)
    return 0
