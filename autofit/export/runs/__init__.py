"""How tools are run for some steps from a file of theirs: one file here for each tool."""

from autofit.core.errors import InputError
from autofit.export.runs import axolotl, llamafactory, msswift, transformers, trl
from autofit.export.runs.run import ToolRun

RUNS = {
    run.tool.name: run
    for run in (axolotl.RUN, llamafactory.RUN, msswift.RUN, transformers.RUN, trl.RUN)
}


def run_of(tool: str) -> ToolRun:
    """How a tool is run.

    Raises:
        InputError: that is not known of it.
    """
    if tool not in RUNS:
        titles = ", ".join(run.tool.title for run in RUNS.values())
        raise InputError(f"how {tool} is run is not known.", f"It is of {titles}.")

    return RUNS[tool]
