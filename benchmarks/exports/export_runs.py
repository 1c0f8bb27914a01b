"""A config exported to a tool and run by the tool's own command, and the same config run by autofit.

Both start from the same weights and train on the same samples of a text file. These are one effective batch, so the
order in which a tool takes them does not matter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

import autofit
from autofit.api.staging import save_random_model, save_tokens
from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.export.runs.run import Stage as ToolStage
from autofit.export.runs.watched import Watch, run_watched
from autofit.hardware.device import detect
from autofit.models import load_preset, workload_from_source
from autofit.models.huggingface import HuggingFaceModel
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

    @property
    def rows(self) -> tuple[str, ...]:
        """The samples themselves, without the token that ends each."""
        text = " ".join(TEXT.read_text(encoding="utf-8").split())
        text = text.encode("ascii", "ignore").decode()
        own = LENGTH - 1
        return tuple(text[start : start + own] for start in range(0, BATCH * own, own))

    def of_tool(self, folder: Path) -> ToolStage:
        """The same for a tool that is started in a folder."""
        return ToolStage(
            folder=folder,
            weights=self.weights,
            texts=self.rows,
            tokens=self.tokens,
            steps=STEPS,
        )

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
    preset = load_preset("tiny-llama")
    save_random_model(HuggingFaceModel(preset.name, preset.task, preset.config), stage.weights)
    save_tokens(stage.rows, stage.tokens)
    stage.texts.mkdir()
    lines = (json.dumps({"text": sample}) for sample in stage.rows)
    stage.lines.write_text("".join(f"{line}\n" for line in lines))
    return stage


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
    variables = {"OMP_NUM_THREADS": "1", **(given or {})}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = run_watched(command, folder, variables, watch=Watch(), seconds=_SECONDS)
    ranks = done.ranks
    if done.code or not ranks or any(len(steps) != STEPS for steps in ranks):
        counts = [len(steps) for steps in ranks]
        raise RuntimeError(f"{' '.join(command)}: {done.code}, {counts} steps\n{done.said[-6000:]}")
    losses = tuple(
        sum(each["total_loss"] for each in step) / len(ranks) for step in zip(*ranks, strict=True)
    )
    last = [steps[-1] for steps in ranks]
    peak, state = (max(each[name] for each in last) for name in ("peak_bytes", "state_bytes"))
    return Taken(losses, peak, state, last[0]["optimizer_name"])


def _version(name: str) -> str:
    try:
        return version({"autofit": "torch-autofit"}.get(name, name)).partition("+")[0]
    except PackageNotFoundError:
        return autofit.__version__
