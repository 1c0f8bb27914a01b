"""Every option of every command: its help, the group it is shown in, and how a shell completes it.

An option is called after its parameter, except where its name is given: that of a flag without an
opposite, and of a parameter that Python would not call so.
"""

from pathlib import Path
from typing import Annotated

import typer

import autofit.cli.completion as completion
import autofit.cli.option as option
from autofit.core.learning import JUDGES, OBJECTIVES
from autofit.core.options import DEVICES, EXECUTORS, PREFERENCES
from autofit.core.tasks import TASK_NAMES
from autofit.core.workload import LEARNT, SCHEDULES
from autofit.hardware.catalogue import card_names, link_names

# What is trained
Model = Annotated[
    str,
    option.option(
        option.MODEL,
        "A preset (see `autofit models`), a directory with its config, a hub id, or file.py:function.",
        "MODEL",
        complete=completion.models,
    ),
]
Teacher = Annotated[
    str | None,
    option.option(
        option.MODEL, "The model that it learns from, with --task distill; named as --model.", "M"
    ),
]
Task = Annotated[
    str | None,
    option.option(
        option.MODEL,
        "What to train it for, such as seq2seq; default: what the class in its config.json says.",
        "TASK",
        complete=TASK_NAMES,
    ),
]
SeqLen = Annotated[
    int | None,
    option.option(
        option.MODEL,
        "Tokens of a sample (diffusion: of a prompt); default 2048 or the model's most.",
        "N",
    ),
]
Resolution = Annotated[
    str | None,
    option.option(
        option.MODEL,
        "Pixels of pictures, with --task diffusion: of a side, or WIDTHxHEIGHT.",
        "PIXELS",
    ),
]
Frames = Annotated[
    int | None,
    option.option(option.MODEL, "Frames of a video, with --task diffusion.", "N"),
]
TrainTextEncoders = Annotated[
    bool,
    option.option(
        option.MODEL,
        "Train the text encoders of Stable Diffusion or SDXL, too; else their outputs are cached.",
        None,
        "--train-text-encoders",
    ),
]
EffectiveBatch = Annotated[
    int | None,
    option.option(option.MODEL, "Samples per optimizer step; default 32.", "N"),
]
TrustRemoteCode = Annotated[
    bool,
    option.option(option.MODEL, "Run the model's own code.", None, "--trust-remote-code"),
]

# What may be used
GpuMem = Annotated[
    str | None,
    option.option(option.BUDGET, "Memory of the card to fit.", "GIB"),
]
Gpu = Annotated[
    str | None,
    option.option(option.BUDGET, "The card to fit, such as rtx-4090.", "NAME", complete=card_names),
]
GpuOrList = Annotated[
    str | None,
    option.option(
        option.BUDGET,
        "The card to fit, such as rtx-4090; list: all of them.",
        "NAME",
        complete=completion.cards_and_list,
    ),
]
Device = Annotated[
    str | None,
    option.option(
        option.BUDGET,
        "cuda or cpu; default: CUDA where there is a card.",
        "DEVICE",
        complete=DEVICES,
    ),
]
Mem = Annotated[
    str | None,
    option.option(
        option.BUDGET, "Memory for tensors on the CPU; default: 80 % of what is free.", "GIB"
    ),
]
HostMem = Annotated[
    str | None,
    option.option(option.BUDGET, "Host memory beside a GPU; default: 80 % of what is free.", "GIB"),
]
Devices = Annotated[
    str,
    option.option(
        option.BUDGET,
        "Devices of a machine that train one config together, with the given memory each; all: like card 0.",
        "N|all",
    ),
]
TunedDevices = Annotated[
    int | None,
    option.option(
        option.BUDGET, "Devices of a machine that train together; default: what the file says.", "N"
    ),
]
SeveralDevices = Annotated[
    str,
    option.option(
        option.BUDGET,
        "Devices of a machine that train one config together; several numbers (1,2,4,8) are compared.",
        "N,...",
    ),
]
Price = Annotated[
    Path | None,
    option.option(
        option.BUDGET,
        "YAML or JSON of dollars an hour for one card, by its name: tells what training costs.",
        "FILE",
    ),
]
Nodes = Annotated[
    int,
    option.option(option.BUDGET, "Machines that train one config together.", "N"),
]
Link = Annotated[
    str | None,
    option.option(
        option.BUDGET,
        "The link between nodes, or between the cards of one; default: what such cards usually have.",
        "NAME",
        complete=link_names,
    ),
]
Margin = Annotated[
    float,
    option.option(option.BUDGET, "Share of the card to leave free.", "SHARE"),
]

# Which configs
Space = Annotated[
    str | None,
    option.option(
        option.SPACE,
        "A search space (see `autofit spaces`) or a YAML file; default: everything for causal "
        "language models, else full.",
        "NAME|FILE",
        complete=completion.spaces,
    ),
]
Narrow = Annotated[
    list[str] | None,
    option.option(
        option.SPACE,
        "Fix a knob to a value, or narrow it to several: precision=bf16,fp32. Once for each knob.",
        "KNOB=VALUE,...",
        "--set",
        complete=completion.settings,
    ),
]
Fix = Annotated[
    list[str] | None,
    option.option(
        option.CONFIG,
        "Set a knob. Once for each knob.",
        "KNOB=VALUE",
        "--set",
        complete=completion.settings,
    ),
]
ConfigFile = Annotated[
    Path | None,
    option.option(
        option.CONFIG,
        "A config, or a result.yaml; default: a usual start, which the answer names.",
        "FILE",
    ),
]

# What the training generates, with --task grpo
Generations = Annotated[
    int | None,
    option.option(option.GENERATION, "Completions of each prompt; default 8.", "N"),
]
PromptLen = Annotated[
    int | None,
    option.option(option.GENERATION, "Tokens of a prompt, at most; default 512.", "N"),
]
CompletionLen = Annotated[
    int | None,
    option.option(option.GENERATION, "Tokens of a completion, at most; default 512.", "N"),
]
Vllm = Annotated[
    str | None,
    option.option(
        option.GENERATION,
        "Where vLLM generates: colocate (the cards that train, the default), server (others) or none "
        "(transformers, in the process that trains).",
        "WHERE",
    ),
]
VllmTensorParallel = Annotated[
    int | None,
    option.option(option.GENERATION, "Devices that share one vLLM; default 1.", "N"),
]
Beta = Annotated[
    float | None,
    option.option(
        option.GENERATION,
        "Weight of the distance from the model before training; default 0, without that model.",
        "WEIGHT",
    ),
]
PlanFile = Annotated[
    Path | None,
    option.option(
        option.OUTPUT,
        "File for TRL's config, with --task grpo; default: it is printed.",
        "FILE",
        "--out",
    ),
]

# How to search
Trials = Annotated[int, option.option(option.SEARCH, "Maximum number of probes.", "N")]
TimeLimit = Annotated[
    str | None,
    option.option(option.SEARCH, "Maximum time, such as 10m.", "TIME"),
]
Tolerance = Annotated[
    float,
    option.option(
        option.SEARCH,
        "Relative speed difference treated as a tie; also the stopping threshold.",
        "SHARE",
    ),
]
Prefer = Annotated[
    str,
    option.option(
        option.SEARCH,
        "What the answer is chosen by: faithful (tier, then losses, then speed), balanced (speed, "
        "discounted for both) or fast (speed alone).",
        "RULE",
        complete=PREFERENCES,
    ),
]
Fast = Annotated[
    bool,
    option.option(
        option.SEARCH,
        "Answer after a few probes and one longer run of the winner alone.",
        None,
        "--fast",
    ),
]
Seed = Annotated[int, option.option(option.SEARCH, "Seed of the search's random draws.", "N")]
Executor = Annotated[
    str,
    option.option(
        option.SEARCH,
        "Where probes run: local, or ray (a Ray cluster; see docs/cluster.md).",
        "NAME",
        complete=EXECUTORS,
    ),
]
Workers = Annotated[
    int | None,
    option.option(
        option.SEARCH,
        "Probes at a time; default: one on each card like card 0, and 1 on a CPU.",
        "N",
    ),
]
ResumeSearch = Annotated[
    bool,
    option.option(option.SEARCH, "Resume the search in --out.", None, "--resume"),
]
NoStore = Annotated[
    bool,
    option.option(
        option.SEARCH,
        "Neither read nor write the cache of earlier measurements.",
        None,
        "--no-store",
    ),
]

# What finalists learn
Judge = Annotated[
    str | None,
    option.option(
        option.SEARCH,
        "Train the finalists on --data after the search, and compare what they learn: loss.",
        "loss",
        complete=JUDGES,
    ),
]
JudgeData = Annotated[
    Path | None,
    option.option(
        option.SEARCH,
        "Data as of autofit train: packed or padded, by the tokens that count; the judge's, too.",
        "PATH",
    ),
]
_allow_missing = "Start what the weights lack, such as a new head, from random numbers."
JudgeAllowMissing = Annotated[
    bool,
    option.option(option.SEARCH, _allow_missing, None, "--allow-missing"),
]
JudgeWeights = Annotated[
    str | None,
    option.option(
        option.SEARCH,
        "Weights, for the tokenizer of --data, and for the judge to start from; default: random.",
        "DIR",
    ),
]
JudgeTime = Annotated[
    str | None,
    option.option(
        option.SEARCH, "Training of each finalist with each of two seeds; default 60s.", "TIME"
    ),
]
JudgeLr = Annotated[
    float | None,
    option.option(
        option.SEARCH,
        "Learning rate of all; default 2e-5 for full training, 2e-4 with LoRA.",
        "RATE",
    ),
]
Objective = Annotated[
    str,
    option.option(
        option.SEARCH,
        "What the best config is: of the most throughput, or loss-per-second, of the least loss in that time.",
        "NAME",
        complete=OBJECTIVES,
    ),
]

# What to train with
Data = Annotated[
    Path,
    option.option(
        option.DATA,
        "Text, JSON, CSV, Parquet (also of images or sound), a folder or .pt of images, a saved Dataset.",
        "PATH",
    ),
]
Weights = Annotated[
    str | None,
    option.option(option.DATA, "Weights to start from: a directory or a hub id.", "DIR"),
]
TeacherWeights = Annotated[
    str | None,
    option.option(
        option.DATA, "Weights of the teacher that a distillation learns from, as --weights.", "DIR"
    ),
]
AllowMissing = Annotated[
    bool,
    option.option(option.DATA, _allow_missing, None, "--allow-missing"),
]
FromScratch = Annotated[
    bool,
    option.option(option.DATA, "Start from random weights.", None, "--from-scratch"),
]
EvalData = Annotated[
    Path | None,
    option.option(option.DATA, "Data to evaluate on after each pass.", "PATH"),
]
Packing = Annotated[
    bool | None,
    option.option(
        option.DATA,
        "Pack samples into full sequences, or pad each; default: pack plain text, else pad.",
        None,
        "--packing/--padding",
    ),
]
Learn = Annotated[
    str,
    option.option(
        option.DATA,
        "Of chats the assistant's turns, of prompts the completions; all: all tokens.",
        "WHAT",
        complete=LEARNT,
    ),
]
Steps = Annotated[int | None, option.option(option.LEARNING, "Optimizer steps.", "N")]
Epochs = Annotated[
    int | None,
    option.option(option.LEARNING, "Passes over the data; default 1.", "N"),
]
LearningRate = Annotated[
    float | None,
    option.option(option.LEARNING, "Learning rate; default 2e-5, with LoRA 2e-4.", "RATE"),
]
LossOption = Annotated[
    list[str] | None,
    option.option(
        option.MODEL,
        "An option of the task's loss, such as beta=0.2 or kind=ipo. Once for each option.",
        "NAME=VALUE",
        "--loss-option",
    ),
]
WeightDecay = Annotated[
    float,
    option.option(option.LEARNING, "Weight decay, of matrices only.", "RATE"),
]
Schedule = Annotated[
    str,
    option.option(
        option.LEARNING,
        "Of the learning rate: constant, cosine or linear.",
        "NAME",
        complete=SCHEDULES,
    ),
]
WarmupSteps = Annotated[
    int,
    option.option(option.LEARNING, "Steps in which the learning rate rises.", "N"),
]
MaxGradNorm = Annotated[
    float | None,
    option.option(option.LEARNING, "Clip gradients to this norm.", "NORM"),
]
TrainSeed = Annotated[
    int,
    option.option(
        option.LEARNING, "Seed of everything random: samples' order, dropout, new weights.", "N"
    ),
]
TrainDevices = Annotated[
    int | None,
    option.option(
        option.RUN, "Devices of this machine to train on; default: as many as the result's.", "N"
    ),
]
TrainOutput = Annotated[
    Path | None,
    option.option(option.RUN, "For checkpoints and the model.", "DIR"),
]
ResumeTraining = Annotated[
    bool,
    option.option(option.RUN, "Resume from the checkpoint in --output.", None, "--resume"),
]
AutoResume = Annotated[
    bool,
    option.option(
        option.RUN,
        "Resume where --output holds a checkpoint, else begin: for a job that may start again.",
        None,
        "--auto-resume",
    ),
]
CheckpointEvery = Annotated[int, option.option(option.RUN, "Steps between two checkpoints.", "N")]
KeepLast = Annotated[
    int,
    option.option(option.RUN, "Number of newest checkpoints to keep.", "N"),
]

# What to write
Out = Annotated[
    Path | None,
    option.option(option.OUTPUT, "Run directory; default: autofit-runs/MODEL-DATE.", "DIR"),
]
MemorySnapshot = Annotated[
    bool,
    option.option(
        option.OUTPUT,
        "Save a trace of a step, its operators, and on CUDA a snapshot of its memory.",
        None,
        "--memory-snapshot",
    ),
]
Alternatives = Annotated[
    bool | None,
    option.option(
        option.OUTPUT,
        "Also show what changing one knob would bring; default: yes, but not with --json, nor where "
        "it takes minutes.",
        None,
        "--alternatives/--no-alternatives",
    ),
]
Json = Annotated[
    bool,
    option.option(option.OUTPUT, "Print one JSON object to stdout.", None, "--json"),
]
Markdown = Annotated[
    bool,
    option.option(option.OUTPUT, "Print the answer as Markdown.", None, "--markdown"),
]
Quiet = Annotated[bool, option.option(option.OUTPUT, "Show no progress.", None, "--quiet")]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]

# What to do with a result
_result = typer.Argument(metavar="RESULT.yaml", help="Of a search, in its run directory.")
Result = Annotated[Path, _result]
ResultOrNone = Annotated[Path | None, _result]
Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a search that has ended.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN_DIR", help="A run directory; two are compared.")
]
Tool = Annotated[
    str,
    option.option(
        option.OUTPUT,
        "The tool, such as axolotl; list: all of them.",
        "TOOL",
        complete=completion.tools,
    ),
]
ForTool = Annotated[
    str | None,
    option.option(
        option.SPACE,
        "Search only what this tool runs exactly as it is measured, such as axolotl.",
        "TOOL",
        "--for",
        complete=completion.tools,
    ),
]
ToolVersion = Annotated[
    str | None,
    option.option(
        option.OUTPUT, "Version of the tool; default: as measured with, else the newest known.", "V"
    ),
]
Strict = Annotated[
    bool,
    option.option(option.OUTPUT, "Fail where the tool would run another config.", None, "--strict"),
]
ExportOutput = Annotated[
    Path | None,
    option.option(option.OUTPUT, "Where to write; default: stdout.", "FILE"),
]
Format = Annotated[
    str | None,
    option.option(
        option.OUTPUT,
        "html, svg, png or md; of two runs a table, or md.",
        "FORMAT",
        "--format",
        complete=completion.formats,
    ),
]
ReportOutput = Annotated[
    Path | None,
    option.option(option.OUTPUT, "Default: in RUN_DIR; for md: stdout.", "FILE"),
]
ClearStore = Annotated[
    bool,
    option.option(option.OUTPUT, "Remove all stored measurements.", None, "--clear-store"),
]
