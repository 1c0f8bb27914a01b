"""Every option of every command: its name, its help, the group it is shown in, and how a shell completes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autofit.cli.completion import cards, cards_and_list, devices, formats, models, schedules, settings, spaces, tools

_MODEL, _BUDGET, _SPACE, _CONFIG, _SEARCH = "Model", "Budget", "Search space", "Config", "Search"
_DATA, _LEARNING, _RUN, _OUTPUT = "Weights and data", "Learning", "Run", "Output"


def _option(group: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=group, **more)


# What is trained

Model = Annotated[
    str,
    _option(
        _MODEL,
        "A preset (see `autofit models`), a directory with config.json, a hub id, or file.py:function.",
        "--model",
        metavar="MODEL",
        autocompletion=models,
    ),
]
SeqLen = Annotated[int | None, _option(_MODEL, "Tokens of a sample; default 2048 or the model's most.", metavar="N")]
EffectiveBatch = Annotated[int | None, _option(_MODEL, "Samples per optimizer step; default 32.", metavar="N")]
TrustRemoteCode = Annotated[bool, _option(_MODEL, "Run the model's own code.", "--trust-remote-code")]

# What may be used

GpuMem = Annotated[str | None, _option(_BUDGET, "Memory of the card to fit.", metavar="GIB")]
Gpu = Annotated[
    str | None,
    _option(_BUDGET, "The card to fit, such as rtx-4090.", metavar="NAME", autocompletion=cards),
]
GpuOrList = Annotated[
    str | None,
    _option(
        _BUDGET,
        "The card to fit, such as rtx-4090; list: all of them.",
        "--gpu",
        metavar="NAME",
        autocompletion=cards_and_list,
    ),
]
Device = Annotated[
    str | None,
    _option(
        _BUDGET,
        "cuda or cpu; default: CUDA where there is a card.",
        metavar="DEVICE",
        autocompletion=devices,
    ),
]
Mem = Annotated[str | None, _option(_BUDGET, "Memory for tensors on the CPU; default: 80 % of free.", metavar="GIB")]
HostMem = Annotated[str | None, _option(_BUDGET, "Host memory beside a GPU; default: 80 % of free.", metavar="GIB")]
Margin = Annotated[float, _option(_BUDGET, "Share of the card that is kept free.", metavar="SHARE")]

# Which configs

Space = Annotated[
    str | None,
    _option(
        _SPACE,
        "Where to start from (see `autofit spaces`), or a YAML file; "
        "default: everything for causal language models, else full.",
        metavar="NAME|FILE",
        autocompletion=spaces,
    ),
]
Narrow = Annotated[
    list[str] | None,
    _option(
        _SPACE,
        "Fix a knob, or narrow it: precision=bf16,fp32. Once for each knob.",
        "--set",
        metavar="KNOB=VALUE,...",
        autocompletion=settings,
    ),
]
Fix = Annotated[
    list[str] | None,
    _option(
        _CONFIG,
        "Set a knob. Once for each knob.",
        "--set",
        metavar="KNOB=VALUE",
        autocompletion=settings,
    ),
]
ConfigFile = Annotated[
    Path | None,
    _option(_CONFIG, "A config, or a result.yaml; default: a usual start, which the answer names.", metavar="FILE"),
]

# How to search

Trials = Annotated[int, _option(_SEARCH, "Probes at most.", metavar="N")]
TimeLimit = Annotated[str | None, _option(_SEARCH, "Time at most, such as 10m.", metavar="TIME")]
Tolerance = Annotated[
    float,
    _option(
        _SEARCH,
        "Differences in speed up to this share count as ties; when no more is expected, the search ends.",
        metavar="SHARE",
    ),
]
Seed = Annotated[int, _option(_SEARCH, "Seed of the search's random draws.", metavar="N")]
Workers = Annotated[
    int | None, _option(_SEARCH, "Probes at a time; default: one on each card like card 0; on a CPU 1.", metavar="N")
]
ResumeSearch = Annotated[bool, _option(_SEARCH, "Go on with the search in --out.", "--resume")]
NoStore = Annotated[
    bool,
    _option(_SEARCH, "Use nothing that earlier searches measured, and keep nothing for later ones.", "--no-store"),
]

# What to train with

Data = Annotated[
    Path,
    _option(_DATA, "Text, .jsonl, .csv, .pt of images, an image folder, or a saved Dataset.", "--data", metavar="PATH"),
]
Weights = Annotated[str | None, _option(_DATA, "Weights to start from: a directory or a hub id.", metavar="DIR")]
FromScratch = Annotated[bool, _option(_DATA, "Start from random weights.", "--from-scratch")]
EvalData = Annotated[Path | None, _option(_DATA, "Evaluate on it after each pass.", metavar="PATH")]
Packing = Annotated[
    bool | None,
    _option(
        _DATA, "Samples in a row, or each padded; default: packing for plain text, else padding.", "--packing/--padding"
    ),
]
Steps = Annotated[int | None, _option(_LEARNING, "Optimizer steps.", metavar="N")]
Epochs = Annotated[int | None, _option(_LEARNING, "Passes over the data; default 1.", metavar="N")]
LearningRate = Annotated[float, _option(_LEARNING, "Learning rate.", metavar="RATE")]
WeightDecay = Annotated[float, _option(_LEARNING, "Weight decay, of matrices only.", metavar="RATE")]
Schedule = Annotated[
    str,
    _option(
        _LEARNING,
        "Of the learning rate: constant, cosine or linear.",
        metavar="NAME",
        autocompletion=schedules,
    ),
]
WarmupSteps = Annotated[int, _option(_LEARNING, "Steps in which the learning rate rises.", metavar="N")]
MaxGradNorm = Annotated[float | None, _option(_LEARNING, "Clip gradients to this norm.", metavar="NORM")]
TrainSeed = Annotated[
    int, _option(_LEARNING, "Seed of all that is random: samples' order, dropout, new weights.", "--seed", metavar="N")
]
TrainOutput = Annotated[Path | None, _option(_RUN, "For checkpoints and the model.", "--output", metavar="DIR")]
ResumeTraining = Annotated[bool, _option(_RUN, "Go on from the checkpoint in --output.", "--resume")]
CheckpointEvery = Annotated[int, _option(_RUN, "Steps between two checkpoints.", metavar="N")]
KeepLast = Annotated[int, _option(_RUN, "Checkpoints that are kept.", metavar="N")]

# What to write

Out = Annotated[Path | None, _option(_OUTPUT, "Run directory; default: autofit-runs/MODEL-DATE.", metavar="DIR")]
MemorySnapshot = Annotated[
    bool,
    _option(
        _OUTPUT,
        "Keep a profiler trace of a step, and on CUDA a snapshot of the memory it took.",
        "--memory-snapshot",
    ),
]
Alternatives = Annotated[
    bool | None,
    _option(
        _OUTPUT,
        "Also what changing one knob would bring; default: yes, but not with --json.",
        "--alternatives/--no-alternatives",
    ),
]
Json = Annotated[bool, _option(_OUTPUT, "Print one JSON object to stdout.", "--json")]
Markdown = Annotated[bool, _option(_OUTPUT, "Print the answer as Markdown.", "--markdown")]
Quiet = Annotated[bool, _option(_OUTPUT, "No progress.", "--quiet")]

# What is made of a result

Result = Annotated[Path, typer.Argument(metavar="RESULT.yaml", help="Of a search, in its run directory.")]
ResultOrNone = Annotated[Path | None, typer.Argument(metavar="RESULT.yaml", help="Of a search, in its run directory.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="A run directory; two are compared.")]
Tool = Annotated[
    str,
    _option(_OUTPUT, "The tool, such as axolotl; list: all of them.", metavar="TOOL", autocompletion=tools),
]
ToolVersion = Annotated[
    str | None, _option(_OUTPUT, "Of the tool; default: as measured with, else the newest known.", metavar="V")
]
Strict = Annotated[bool, _option(_OUTPUT, "Fail where the tool would run another config.", "--strict")]
ExportOutput = Annotated[Path | None, _option(_OUTPUT, "Where to write; default: stdout.", "--output", metavar="FILE")]
Format = Annotated[
    str | None,
    _option(
        _OUTPUT,
        "html, svg, png or md; of two runs a table, or md.",
        "--format",
        metavar="FORMAT",
        autocompletion=formats,
    ),
]
ReportOutput = Annotated[
    Path | None, _option(_OUTPUT, "Default: in RUN_DIR; of md: stdout.", "--output", metavar="FILE")
]
ClearStore = Annotated[bool, _option(_OUTPUT, "Forget what searches have measured.", "--clear-store")]

# Of the whole command line

Version = Annotated[bool, typer.Option("--version", help="Print the version.")]
