"""The options of `autofit train` for models of pictures alone."""

from typing import Annotated

import autofit.cli.option as option

ByShape = Annotated[
    bool,
    option.option(
        option.DATA,
        "Pictures keep about their own shapes, in batches of one shape; else all are cut to one.",
        None,
        "--by-shape",
    ),
]
SampleEvery = Annotated[
    int | None,
    option.option(
        option.OUTPUT,
        "Make sample pictures before training, and every so many steps, in OUTPUT/samples.",
        "N",
        "--sample-every",
    ),
]
SamplePrompt = Annotated[
    list[str] | None,
    option.option(
        option.OUTPUT,
        "What a sample picture is to show; may be repeated. Default: the first two captions.",
        "TEXT",
        "--sample-prompt",
    ),
]
