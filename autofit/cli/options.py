"""Every option of every command: its name, its help, the group it is shown in, and how a shell completes it."""

from pathlib import Path
from typing import Annotated, Any

import typer

import autofit.cli.completion as completion
from autofit.core.learning import JUDGES, OBJECTIVES
from autofit.core.options import DEVICES, EXECUTORS
from autofit.core.tasks import TASK_NAMES
from autofit.core.workload import LEARNT, SCHEDULES
from autofit.hardware.catalogue import card_names, link_names

_MODEL, _BUDGET, _SPACE, _CONFIG, _SEARCH = "Model", "Budget", "Search space", "Config", "Search"
_DATA, _LEARNING, _RUN, _OUTPUT = "Weights and data", "Learning", "Run", "Output"


def _option(group: str, text: str, metavar: str | None, *names: str, complete: Any = None) -> Any:
    """`complete` holds the words that a shell offers, or is a function that finds them."""
    offer = (lambda: list(complete)) if isinstance(complete, tuple) else complete
    return typer.Option(*names, help=text, rich_help_panel=group, metavar=metavar, autocompletion=offer)


# What is trained
_models = "A preset (see `autofit models`), a directory with config.json, a hub id, or file.py:function."
Model = Annotated[str, _option(_MODEL, _models, "MODEL", "--model", complete=completion.models)]
_task = "What to train it for, such as seq2seq; default: what the class in its config.json says."
Task = Annotated[str | None, _option(_MODEL, _task, "TASK", complete=TASK_NAMES)]
SeqLen = Annotated[int | None, _option(_MODEL, "Tokens of a sample; default 2048 or the model's most.", "N")]
EffectiveBatch = Annotated[int | None, _option(_MODEL, "Samples per optimizer step; default 32.", "N")]
TrustRemoteCode = Annotated[bool, _option(_MODEL, "Run the model's own code.", None, "--trust-remote-code")]

# What may be used
_gpu = "The card to fit, such as rtx-4090"
_gpu_or_list = f"{_gpu}; list: all of them."
_devices = "Devices of a machine that train one config together, with the given memory each; all: like card 0."
_several = "Devices of a machine that train one config together; several numbers (1,2,4,8) are compared."
_price = "YAML or JSON of dollars an hour for one card, by its name: tells what training costs."
_link = "The link between nodes, or between the cards of one; default: what such cards usually have."
_device = "cuda or cpu; default: CUDA where there is a card."
GpuMem = Annotated[str | None, _option(_BUDGET, "Memory of the card to fit.", "GIB")]
Gpu = Annotated[str | None, _option(_BUDGET, f"{_gpu}.", "NAME", complete=card_names)]
GpuOrList = Annotated[str | None, _option(_BUDGET, _gpu_or_list, "NAME", "--gpu", complete=completion.cards_and_list)]
Device = Annotated[str | None, _option(_BUDGET, _device, "DEVICE", complete=DEVICES)]
Mem = Annotated[str | None, _option(_BUDGET, "Memory for tensors on the CPU; default: 80 % of what is free.", "GIB")]
HostMem = Annotated[str | None, _option(_BUDGET, "Host memory beside a GPU; default: 80 % of what is free.", "GIB")]
Devices = Annotated[str, _option(_BUDGET, _devices, "N|all")]
SeveralDevices = Annotated[str, _option(_BUDGET, _several, "N,...", "--devices")]
Price = Annotated[Path | None, _option(_BUDGET, _price, "FILE")]
Nodes = Annotated[int, _option(_BUDGET, "Machines that train one config together.", "N")]
Link = Annotated[str | None, _option(_BUDGET, _link, "NAME", complete=link_names)]
Margin = Annotated[float, _option(_BUDGET, "Share of the card to leave free.", "SHARE")]

# Which configs
_space = (
    "A search space (see `autofit spaces`) or a YAML file; default: everything for causal language models, else full."
)
_narrow = "Fix a knob to a value, or narrow it to several: precision=bf16,fp32. Once for each knob."
_fix = "Set a knob. Once for each knob."
_config = "A config, or a result.yaml; default: a usual start, which the answer names."
Space = Annotated[str | None, _option(_SPACE, _space, "NAME|FILE", complete=completion.spaces)]
Narrow = Annotated[list[str] | None, _option(_SPACE, _narrow, "KNOB=VALUE,...", "--set", complete=completion.settings)]
Fix = Annotated[list[str] | None, _option(_CONFIG, _fix, "KNOB=VALUE", "--set", complete=completion.settings)]
ConfigFile = Annotated[Path | None, _option(_CONFIG, _config, "FILE")]

# How to search
_tolerance = "Relative speed difference treated as a tie; also the stopping threshold."
_fast = "Answer after a few probes and one longer run of the winner alone."
_no_store = "Neither read nor write the cache of earlier measurements."
_executor = "Where probes run: local, or ray (a Ray cluster; see docs/cluster.md)."
_workers = "Probes at a time; default: one on each card like card 0, and 1 on a CPU."
Trials = Annotated[int, _option(_SEARCH, "Maximum number of probes.", "N")]
TimeLimit = Annotated[str | None, _option(_SEARCH, "Maximum time, such as 10m.", "TIME")]
Tolerance = Annotated[float, _option(_SEARCH, _tolerance, "SHARE")]
Fast = Annotated[bool, _option(_SEARCH, _fast, None, "--fast")]
Seed = Annotated[int, _option(_SEARCH, "Seed of the search's random draws.", "N")]
Executor = Annotated[str, _option(_SEARCH, _executor, "NAME", complete=EXECUTORS)]
Workers = Annotated[int | None, _option(_SEARCH, _workers, "N")]
ResumeSearch = Annotated[bool, _option(_SEARCH, "Resume the search in --out.", None, "--resume")]
NoStore = Annotated[bool, _option(_SEARCH, _no_store, None, "--no-store")]

# What finalists learn
_judge = "Train the finalists on --data after the search, and compare what they learn: loss."
_judge_time = "Training of each finalist with each of two seeds; default 60s."
_objective = "What the best config is: of the most throughput, or loss-per-second, of the least loss in that time."
Judge = Annotated[str | None, _option(_SEARCH, _judge, "loss", complete=JUDGES)]
_judge_data = "Data as of autofit train: packed or padded, by the tokens that count; the judge's, too."
_judge_weights = "Weights, for the tokenizer of --data, and for the judge to start from; default: random."
JudgeData = Annotated[Path | None, _option(_SEARCH, _judge_data, "PATH", "--data")]
_allow_missing = "Start what the weights lack, such as a new head, from random numbers."
JudgeAllowMissing = Annotated[bool, _option(_SEARCH, _allow_missing, None, "--allow-missing")]
JudgeWeights = Annotated[str | None, _option(_SEARCH, _judge_weights, "DIR", "--weights")]
JudgeTime = Annotated[str | None, _option(_SEARCH, _judge_time, "TIME")]
JudgeLr = Annotated[float | None, _option(_SEARCH, "Learning rate of all; default 1e-4.", "RATE", "--lr")]
Objective = Annotated[str, _option(_SEARCH, _objective, "NAME", complete=OBJECTIVES)]

# What to train with
_data = "Text, JSON, CSV, Parquet (also of images or sound), a folder or .pt of images, a saved Dataset."
_packing = "Pack samples into full sequences, or pad each; default: pack plain text, else pad."
_learn = "Of chats the assistant's turns, of prompts the completions; all: all tokens."
_train_devices = "Devices of this machine to train on; default: as many as the result is for."
_train_seed = "Seed of everything random: samples' order, dropout, new weights."
Data = Annotated[Path, _option(_DATA, _data, "PATH", "--data")]
Weights = Annotated[str | None, _option(_DATA, "Weights to start from: a directory or a hub id.", "DIR")]
AllowMissing = Annotated[bool, _option(_DATA, _allow_missing, None, "--allow-missing")]
FromScratch = Annotated[bool, _option(_DATA, "Start from random weights.", None, "--from-scratch")]
EvalData = Annotated[Path | None, _option(_DATA, "Data to evaluate on after each pass.", "PATH")]
Packing = Annotated[bool | None, _option(_DATA, _packing, None, "--packing/--padding")]
Learn = Annotated[str, _option(_DATA, _learn, "WHAT", "--learn", complete=LEARNT)]
Steps = Annotated[int | None, _option(_LEARNING, "Optimizer steps.", "N")]
Epochs = Annotated[int | None, _option(_LEARNING, "Passes over the data; default 1.", "N")]
LearningRate = Annotated[float, _option(_LEARNING, "Learning rate.", "RATE")]
WeightDecay = Annotated[float, _option(_LEARNING, "Weight decay, of matrices only.", "RATE")]
_schedule = "Of the learning rate: constant, cosine or linear."
Schedule = Annotated[str, _option(_LEARNING, _schedule, "NAME", complete=SCHEDULES)]
WarmupSteps = Annotated[int, _option(_LEARNING, "Steps in which the learning rate rises.", "N")]
MaxGradNorm = Annotated[float | None, _option(_LEARNING, "Clip gradients to this norm.", "NORM")]
TrainSeed = Annotated[int, _option(_LEARNING, _train_seed, "N", "--seed")]
TrainDevices = Annotated[int | None, _option(_RUN, _train_devices, "N", "--devices")]
TrainOutput = Annotated[Path | None, _option(_RUN, "For checkpoints and the model.", "DIR", "--output")]
ResumeTraining = Annotated[bool, _option(_RUN, "Resume from the checkpoint in --output.", None, "--resume")]
CheckpointEvery = Annotated[int, _option(_RUN, "Steps between two checkpoints.", "N")]
KeepLast = Annotated[int, _option(_RUN, "Number of newest checkpoints to keep.", "N")]

# What to write
_snapshot = "Save a trace of a step, its operators, and on CUDA a snapshot of its memory."
_alternatives = "Also show what changing one knob would bring; default: yes, but not with --json."
Out = Annotated[Path | None, _option(_OUTPUT, "Run directory; default: autofit-runs/MODEL-DATE.", "DIR")]
MemorySnapshot = Annotated[bool, _option(_OUTPUT, _snapshot, None, "--memory-snapshot")]
Alternatives = Annotated[bool | None, _option(_OUTPUT, _alternatives, None, "--alternatives/--no-alternatives")]
Json = Annotated[bool, _option(_OUTPUT, "Print one JSON object to stdout.", None, "--json")]
Markdown = Annotated[bool, _option(_OUTPUT, "Print the answer as Markdown.", None, "--markdown")]
Quiet = Annotated[bool, _option(_OUTPUT, "Show no progress.", None, "--quiet")]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]

# What to do with a result
_tool = "The tool, such as axolotl; list: all of them."
_tool_version = "Version of the tool; default: as measured with, else the newest known."
_result = typer.Argument(metavar="RESULT.yaml", help="Of a search, in its run directory.")
_report_output = "Default: in RUN_DIR; for md: stdout."
Result = Annotated[Path, _result]
ResultOrNone = Annotated[Path | None, _result]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="A run directory; two are compared.")]
Tool = Annotated[str, _option(_OUTPUT, _tool, "TOOL", complete=completion.tools)]
ToolVersion = Annotated[str | None, _option(_OUTPUT, _tool_version, "V")]
Strict = Annotated[bool, _option(_OUTPUT, "Fail where the tool would run another config.", None, "--strict")]
ExportOutput = Annotated[Path | None, _option(_OUTPUT, "Where to write; default: stdout.", "FILE", "--output")]
_format = "html, svg, png or md; of two runs a table, or md."
Format = Annotated[str | None, _option(_OUTPUT, _format, "FORMAT", "--format", complete=completion.formats)]
ReportOutput = Annotated[Path | None, _option(_OUTPUT, _report_output, "FILE", "--output")]
ClearStore = Annotated[bool, _option(_OUTPUT, "Remove all stored measurements.", None, "--clear-store")]
