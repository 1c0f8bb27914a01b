"""The options of `autofit tune` alone."""

from pathlib import Path
from typing import Annotated

import typer

import autofit.cli.option as option

ToolFile = Annotated[
    list[str],
    typer.Argument(metavar="FILE|-- COMMAND", help="What axolotl, TRL or the like trains by."),
]
ModelOfFile = Annotated[
    str | None,
    option.option(
        option.MODEL, "A preset or a directory in place of the model that the file names.", "MODEL"
    ),
]
Keep = Annotated[
    list[str] | None,
    option.option(option.SPACE, "A key of the file that stays; may be repeated.", "KEY"),
]
Free = Annotated[
    list[str] | None,
    option.option(
        option.SPACE,
        "A key of the file that may change though something else is learnt; may be repeated.",
        "KEY",
    ),
]
TunedOutput = Annotated[
    Path | None,
    option.option(option.OUTPUT, "Where to write; default: FILE.tuned.yaml beside it.", "FILE"),
]
InPlace = Annotated[
    bool,
    option.option(option.OUTPUT, "Write over the file.", None, "--in-place"),
]
VerifyInTool = Annotated[
    bool,
    option.option(
        option.RUN,
        "Train some steps from the new file by its own tool, and say what differs.",
        None,
        "--verify-in-tool",
    ),
]
ToolPython = Annotated[
    Path | None,
    option.option(option.RUN, "The interpreter that has the tool; default: this one.", "PATH"),
]
