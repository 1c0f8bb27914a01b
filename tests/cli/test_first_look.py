"""What is wrong with arguments is told at once: before torch is imported, and never by a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.command import MINE, RESULT

SPACES = {
    "malformed": "description: x\nknobs:\n  precision: [fp32\n  optimizer: [adamw]\n",
    "doubled": "description: x\nknobs:\n  precision: [fp32]\n  precision: [bf16]\n",
    "harmful": "description: x\nknobs: !!python/object/apply:os.mkdir [ran]\n",
    "unknown": "description: x\nknobs:\n  precison: [fp32]\n",
    "negative": "description: x\nknobs:\n  lora_rank: [-1]\n",
}
SEARCH = ("search", "--model", "tiny-llama", "--device", "cpu", "--mem", "2")
ESTIMATE = ("estimate", "--model", "tiny-llama", "--gpu", "t4")
TRAIN = ("train", "result.yaml", "--data", "mine.py", "--from-scratch")
EXPORT = ("export", "result.yaml", "--to", "trl")
ALPHA = "lora_alpha cannot be -1. It takes a number above 0, or null for 32."
RANK = "It takes a whole number from 0 (train all weights) to 1024."

TOLD = [
    (
        (*SEARCH, "--set", "precison=fp32"),
        "unknown knob to search 'precison'. Did you mean 'precision'?",
    ),
    (
        (*SEARCH, "--set", "precision=bf61"),
        "unknown value for precision 'bf61'. Did you mean 'bf16'?",
    ),
    ((*SEARCH, "--set", "precision"), "--set 'precision' is not knob=value."),
    ((*SEARCH, "--set", "precision=[bf16"), "cannot be read as YAML"),
    ((*SEARCH, "--set", "lora_rank=0,0"), "lora_rank lists 0 twice"),
    ((*SEARCH, "--set", "lora_alpha=-1"), ALPHA),
    ((*SEARCH, "--set", "lora_alpha=x"), "lora_alpha cannot be 'x'. It takes a number above 0"),
    ((*SEARCH, "--set", "lora_dropout=1"), "It takes a share from 0 to below 1, or null for none."),
    ((*SEARCH, "--set", "lora_rank=7.5"), RANK),
    ((*SEARCH, "--set", "lora_rank=null"), f"lora_rank cannot be null. {RANK}"),
    (
        (*SEARCH, "--set", "micro_batch_size=0"),
        "It takes a whole number that divides the effective batch, or null",
    ),
    ((*SEARCH, "--set", "gradient_accumulation_steps=2"), "unknown knob to search"),
    ((*SEARCH, "--space", "fulll"), "unknown space 'fulll'. Did you mean 'full'?"),
    ((*SEARCH, "--space", "malformed.yaml"), "malformed.yaml cannot be read as YAML"),
    ((*SEARCH, "--space", "doubled.yaml"), "the key 'precision' is given twice (line 4)"),
    ((*SEARCH, "--space", "harmful.yaml"), "python/object/apply"),
    ((*SEARCH, "--space", "unknown.yaml"), "unknown knob to search 'precison'"),
    ((*SEARCH, "--space", "negative.yaml"), RANK),
    ((*SEARCH, "--trials", "0"), "the number of trials must be at least 1, not 0."),
    ((*SEARCH, "--workers", "0"), "the number of workers must be at least 1, not 0."),
    ((*SEARCH, "--seed", "9" * 30), "seed must be a whole number of at most 63 bits"),
    (
        (*SEARCH, "--effective-batch", "0"),
        "the effective batch size must be a positive whole number, not 0.",
    ),
    ((*SEARCH, "--seq-len", "-1"), "the sequence length must be from 1 to 2,147,483,648, not -1."),
    ((*SEARCH, "--lr", "1"), "--lr is for judging what configs learn. Add --judge loss."),
    (
        (*SEARCH, "--weights", "."),
        "--weights has the tokenizer of --data, which is not given. Add --data FILE.",
    ),
    ((*SEARCH, "--objective", "loss-per-second"), "--objective is for judging what configs learn."),
    ((*SEARCH, "--judge", "los"), "unknown judge 'los'. Did you mean 'loss'?"),
    ((*SEARCH, "--judge", "loss"), "data to learn from is needed. Add --data FILE."),
    ((*SEARCH, "--judge", "loss", "--data", "none.txt"), "the data file none.txt is not there."),
    ((*SEARCH, "--out", "mine.py"), "mine.py is a file, not a directory."),
    ((*SEARCH, "--out", "mine.py/run"), "mine.py is a file, not a directory."),
    ((*SEARCH, "--out", "."), "already holds other files."),
    ((*SEARCH, "--out", "none", "--resume"), "there is no search to resume in"),
    (("search", "--model", "tiny-llama", "--gpu", "t5"), "unknown GPU 't5'. Did you mean 't4'?"),
    (("search", "--model", "tiny-llama", "--gpu", ""), "unknown GPU ''."),
    (("search", "--model", "tiny-llama", "--gpu", "mi300x"), "MI300X is not supported"),
    (("search", "--model", "tiny-lama"), "unknown model 'tiny-lama'. Did you mean 'tiny-llama'?"),
    (("search", "--model", "mine.py"), "mine.py is a file, not a model. Write mine.py:FUNCTION."),
    (("search", "--model", "listed"), "config.json should hold a mapping, not list."),
    (("search", "--model", "runs"), "holds no config.json."),
    (("search", "--model", "endless"), "config.json cannot be read: it is no regular file."),
    (("search", "--model", "blocking"), "config.json cannot be read: it is no regular file."),
    ((*ESTIMATE, "--set", "precison=bf16"), "unknown knob 'precison'. Did you mean 'precision'?"),
    ((*ESTIMATE, "--set", "lora_alpha=-1"), ALPHA),
    (
        (*ESTIMATE, "--set", "precision=bf16,fp32"),
        "precision is set to 2 values, and a config has one.",
    ),
    ((*ESTIMATE, "--config", "none.yaml"), "the file none.yaml is not there."),
    ((*ESTIMATE, "--config", "malformed.yaml"), "malformed.yaml cannot be read as YAML"),
    ((*ESTIMATE, "--config", "doubled.yaml"), "the key 'precision' is given twice"),
    ((*ESTIMATE, "--config", "."), "the file . cannot be read: Is a directory."),
    (
        (*ESTIMATE, "--config", "/dev/zero"),
        "the file /dev/zero cannot be read: it is no regular file.",
    ),
    (
        (*ESTIMATE, "--config", "/dev/random"),
        "the file /dev/random cannot be read: it is no regular file.",
    ),
    ((*ESTIMATE, "--config", "fifo"), "the file fifo cannot be read: it is no regular file."),
    ((*ESTIMATE, "--config", "unknown.yaml"), "unknown knob 'description'"),
    (("estimate", "--model", "tiny-llama", "--gpu", "t5"), "unknown GPU 't5'. Did you mean 't4'?"),
    (
        ("estimate", "--model", "tiny-llama", "--mem", "0"),
        "the memory must be more than 0 GiB, not 0.",
    ),
    (
        ("estimate", "--model", "no/such/place", "--gpu", "list"),
        "the directory no/such/place is not there.",
    ),
    (("train", "none.yaml", *TRAIN[2:]), "the file none.yaml is not there."),
    (("train", "doubled.yaml", *TRAIN[2:]), "the key 'precision' is given twice"),
    (("train", "fifo", *TRAIN[2:]), "the file fifo cannot be read: it is no regular file."),
    (("train", "function.yaml", *TRAIN[2:]), "no file has autofit run code"),
    (("train", "moved.yaml", *TRAIN[2:]), "/no/such/model is not there."),
    (
        ("train", "renamed.yaml", *TRAIN[2:]),
        "unknown model 'tiny-lama'. Did you mean 'tiny-llama'?",
    ),
    ((*TRAIN, "--steps", "0"), "the length of training must be a positive whole number, not 0."),
    ((*TRAIN, "--steps", "1", "--epochs", "1"), "epochs and steps both say how long to train."),
    ((*TRAIN, "--lr", "0"), "the learning rate must be positive, not 0.0."),
    (
        (*TRAIN, "--schedule", "linar"),
        "schedule must be one of constant, cosine, linear, not 'linar'.",
    ),
    ((*TRAIN, "--keep-last", "0"), "keep_last must be a whole number from 1, not 0."),
    ((*TRAIN, "--data", "none.txt"), "the data file none.txt is not there."),
    ((*TRAIN, "--data", "fifo"), "the data file fifo cannot be read: it is no regular file."),
    ((*TRAIN, "--eval-data", "/dev/zero"), "/dev/zero cannot be read: it is no regular file."),
    ((*TRAIN, "--output", "mine.py"), "mine.py is a file, not a directory."),
    ((*TRAIN, "--resume"), "to resume, the directory must be named."),
    ((*TRAIN, "--output", "none", "--resume"), "there is no run to resume in"),
    ((*TRAIN[:-1], "--weights", "none"), "the directory none is not there."),
    (("export", "none.yaml", "--to", "trl"), "the file none.yaml is not there."),
    (("export", "result.yaml", "--to", "tlr"), "unknown tool 'tlr'. Did you mean 'trl'?"),
    (
        ("export", "/dev/zero", "--to", "trl"),
        "the file /dev/zero cannot be read: it is no regular file.",
    ),
    ((*EXPORT, "--tool-version", "new"), "'new' is not a version of TRL."),
    ((*EXPORT, "--output", "runs"), "runs cannot be written: Is a directory."),
    ((*EXPORT, "--output", "mine.py/x"), "mine.py is a file, not a directory."),
    (("report", "none"), "none is not there."),
    (("report", "fifo"), "fifo is a file, not a run directory."),
    (("doctor", "--device", "tpu"), "the device must be cpu or cuda, not 'tpu'."),
]

ODD = [
    "",
    "-1",
    "0",
    "x",
    "nan",
    "1e400",
    "9" * 5000,
    "\udcff",
    "=",
    "a=b",
    "\n",
    "\x1b[31m",
    "[red]",
    "{}",
    "~nobody/x",
]
ODD += [
    "/dev/zero",
    "fifo",
    "n" * 300,
    ".",
    "/",
    "mine.py",
    "mine.py/x",
    "null",
    "malformed.yaml",
    "1_000",
    "\uff11",
]
OPTIONS = {
    SEARCH: (
        "model",
        "seq-len",
        "gpu-mem",
        "gpu",
        "device",
        "mem",
        "margin",
        "space",
        "set",
        "trials",
        "time-limit",
        "out",
    ),
    ESTIMATE: ("model", "effective-batch", "gpu", "device", "config", "set"),
    TRAIN: (
        "data",
        "weights",
        "steps",
        "lr",
        "schedule",
        "warmup-steps",
        "max-grad-norm",
        "seed",
        "output",
        "keep-last",
    ),
    EXPORT: ("to", "output", "tool-version"),
    ("report", "none"): ("format", "output"),
    ("doctor",): ("device",),
    ("models",): (),
}


class Ended(NamedTuple):
    """How a command ended, see `many_commands`."""

    code: object
    out: str
    err: str
    torch: bool


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[Sequence[str]]], list[Ended]]:
    """Runs commands in a folder with what they name."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "mine.py").write_text(MINE)
    (folder / "result.yaml").write_text(RESULT)
    source = "source: {kind: preset, model: tiny-llama}"
    for name, other in {
        "function": "source: {kind: function, function: 'mine.py:good'}",
        "moved": "source: {kind: directory, path: /no/such/model}",
        "renamed": "source: {kind: preset, model: tiny-lama}",
    }.items():
        (folder / f"{name}.yaml").write_text(RESULT.replace(source, other))
    for name, text in SPACES.items():
        (folder / f"{name}.yaml").write_text(text)
    for name in ("runs", "listed", "endless", "blocking"):
        (folder / name).mkdir()
    (folder / "listed" / "config.json").write_text("[]")
    (folder / "endless" / "config.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "blocking" / "config.json")
    os.mkfifo(folder / "fifo")

    def run(commands: Sequence[Sequence[str]]) -> list[Ended]:
        root = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.cli.many_commands"],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            check=True,
            timeout=300,
        )
        assert not (folder / "ran").exists()
        return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]

    return run


def test_it_is_told_before_torch_is_imported(
    ended: Callable[[Sequence[Sequence[str]]], list[Ended]],
) -> None:
    for (arguments, words), end in zip(
        TOLD, ended([arguments for arguments, _ in TOLD]), strict=True
    ):
        assert (end.code, end.out, end.torch) == (2, "", False), (arguments, end)
        assert end.err.startswith("autofit: "), (arguments, end)
        assert end.err.count("\n") == 1, (arguments, end)
        assert words in end.err, arguments


def test_what_is_right_goes_on(ended: Callable[[Sequence[Sequence[str]]], list[Ended]]) -> None:
    commands = [
        (
            *SEARCH,
            "--set",
            "precision=bf16,fp32",
            "--set",
            "optimizer=null",
            "--space",
            "qlora",
            "--out",
            "new/run",
        ),
        # which it may register
        (*SEARCH[:2], "mine.py:workload", "--set", "memory_format=channels_last"),
        (
            *ESTIMATE,
            "--set",
            "gradient_accumulation_steps=4",
            "--set",
            "lora_alpha=0.5",
            "--config",
            "result.yaml",
        ),
        (*TRAIN, "--output", "new"),
        (*EXPORT, "--output", "/dev/stdout"),
        ("doctor", "--device", "cpu"),
        ("spaces",),
    ]
    for arguments, end in zip(commands, ended(commands), strict=True):
        assert end == Ended("reached", "", "", False), arguments


def test_odd_arguments_are_told_in_one_sentence(
    ended: Callable[[Sequence[Sequence[str]]], list[Ended]],
) -> None:
    places = list(OPTIONS)
    places += [(*command, f"--{name}") for command, names in OPTIONS.items() for name in names]
    commands = [
        (*place, word) for number, place in enumerate(places) for word in ODD[number % 5 :: 5]
    ]
    commands += [(word, *rest) for word in ODD[::3] for rest in ((), ("--json",))]
    for arguments, end in zip(commands, ended(commands), strict=True):
        assert not end.torch, arguments
        assert end.code in (2, "reached"), (arguments, end.code)
        if end.code == 2:
            assert end.err.startswith("autofit: "), (arguments, end)
            assert end.err.count("\n") == 1, (arguments, end)
            assert ("--json" in arguments) == bool(end.out), (arguments, end)
