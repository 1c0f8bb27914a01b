"""A config exported to a tool and run by the tool's own command, and the same config run by autofit.

Both start from the same weights and train on the same samples of a text file. These are one effective batch, so the
order in which a tool takes them does not matter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import autofit
from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.hardware.device import detect
from autofit.models import load_preset, workload_from_source
from autofit.techniques import canonicalize

ROOT = Path(__file__).parents[2]
SCRIPTS, TEXT = Path(__file__).with_name("scripts"), ROOT / "examples" / "data" / "alice.txt"
STEPS, LENGTH, BATCH = 3, 128, 8
_SECONDS = 400
_PACKAGES = ("autofit", "torch", "transformers", "peft", "bitsandbytes", "torchao")
_HARDWARE = {"device": "cpu", "name": "CPU", "budget_gib": 2.0}


@dataclass(frozen=True)
class Taken:
    """What the steps of a run took: the loss of each of the effective batch, and what the rank that needs most held in
    the last one."""

    losses: tuple[float, ...]
    peak_bytes: int
    state_bytes: int
    optimizer: str


@dataclass(frozen=True)
class Stage:
    """A folder that holds what every run starts from: a model and its tokenizer, and the samples."""

    folder: Path

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "directory", "path": str(self.weights)}

    @property
    def workload(self) -> dict[str, Any]:
        return {"task": "causal-lm", "sequence_length": LENGTH, "effective_batch_size": BATCH}

    @property
    def tokens(self) -> Path:
        """The samples as token ids, a `Dataset.save_to_disk`."""
        return self.folder / "tokens"

    @property
    def texts(self) -> Path:
        """The samples as a directory with a file of JSON lines."""
        return self.folder / "texts"

    @property
    def lines(self) -> Path:
        """That file."""
        return self.texts / "samples.jsonl"

    def result(self, config: Mapping[str, Any], folder: Path) -> Path:
        """A result.yaml with that config, which a search might have written."""
        packages = {name: _version(name) for name in _PACKAGES}
        layout = Layout.of(config)
        data = {
            "autofit": 1,
            "model": "tiny-llama",
            "workload": self.workload,
            "source": self.source,
        }
        data |= {
            "hardware": _HARDWARE,
            "versions": packages,
            "config": dict(config),
            "measured": {},
        }
        data |= {"devices": layout.world} if layout.world > 1 else {}
        path = folder / "result.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path


def staged(folder: Path) -> Stage:
    """Random weights of tiny-llama, a tokenizer of bytes, and the first samples of a text."""
    stage = Stage(folder)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**load_preset("tiny-llama").config)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        stage.weights
    )
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(stage.weights)
    text = " ".join(TEXT.read_text(encoding="utf-8").split()).encode("ascii", "ignore").decode()
    own = LENGTH - 1  # and the token that ends a sample
    samples = [text[start : start + own] for start in range(0, BATCH * own, own)]
    ids = [[*tokenizer(sample)["input_ids"], tokenizer.eos_token_id] for sample in samples]
    assert {len(each) for each in ids} == {LENGTH}
    Dataset.from_dict({"input_ids": ids, "labels": ids}).save_to_disk(stage.tokens)
    stage.texts.mkdir()
    lines = (json.dumps({"text": sample}) for sample in samples)
    stage.lines.write_text("".join(f"{line}\n" for line in lines))
    return stage


def _tokenizer() -> Any:
    """Each byte is a token."""
    alphabet = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    made = Tokenizer(
        models.BPE(
            vocab={**alphabet, "<end>": len(alphabet), "<pad>": len(alphabet) + 1}, merges=[]
        )
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>"
    )


def canonical(stage: Stage, knobs: Mapping[str, Any]) -> Config:
    """With every knob in it, for as many devices as they ask for."""
    workload = workload_from_source(stage.source, stage.workload)
    ranks = 2 if knobs.get("data_parallel") else 1
    return canonicalize(knobs, workload, detect("cpu").of_several(ranks))


def ours(stage: Stage, config: Config, folder: Path) -> Taken:
    """Three steps of autofit's own."""
    case = folder / "case.json"
    shared = {
        "source": stage.source,
        "workload": stage.workload,
        "data": str(stage.tokens),
        "steps": STEPS,
    }
    case.write_text(json.dumps(shared | {"config": dict(config)}))
    return taken([sys.executable, *torchrun(config), str(SCRIPTS / "ours.py"), str(case)], folder)


def torchrun(config: Config) -> list[str]:
    """What starts a process for each device, if there are several."""
    world = Layout.of(config).world
    return (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        if world > 1
        else []
    )


def taken(command: list[str], folder: Path, given: Mapping[str, str] | None = None) -> Taken:
    """What the steps of a command took, on all of its ranks; `given`: to its environment. Raises RuntimeError with its
    last words if it fails."""
    watched = folder / "steps"
    watched.mkdir()
    path = os.pathsep.join((str(Path(__file__).with_name("watch")), str(ROOT)))
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment = {
        **os.environ,
        **quiet,
        **(given or {}),
        "PYTHONPATH": path,
        "WATCHED_STEPS": str(watched),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS
    )
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in watched.iterdir()
    ]
    if done.returncode or not ranks or any(len(steps) != STEPS for steps in ranks):
        raise RuntimeError(
            f"{' '.join(command)}: {done.returncode}, {list(map(len, ranks))} steps\n{_last(done)}"
        )
    losses = tuple(
        sum(each["loss"] for each in step) / len(ranks) for step in zip(*ranks, strict=True)
    )
    last = [steps[-1] for steps in ranks]
    peak, state = (max(each[name] for each in last) for name in ("peak_bytes", "state_bytes"))
    return Taken(losses, peak, state, last[0]["optimizer"])


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-6000:]


def _version(name: str) -> str:
    try:
        return version({"autofit": "torch-autofit"}.get(name, name)).partition("+")[0]
    except PackageNotFoundError:
        return autofit.__version__
