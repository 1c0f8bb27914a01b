"""Training that is killed by the system at any moment, and resumed, ends with the weights of one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from tests import warm

# Forks a process for each run: it has imported everything by then, and computed nothing. A run is told where to be
# killed: in a step, or before a call that writes a checkpoint to the disk.
RUNS = """
import json
import os
import signal
import sys

import numpy as np
from tests import tiny
import torch
import torch._dynamo  # what the first step of an optimizer imports
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autofit
from autofit.api.fit import fit

SAMPLES, EPOCHS = 24, 4


class Noisy(Dataset):
    '''Samples with noise, drawn anew in every pass.'''

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(48, generator=generator) + 0.1 * torch.randn(48)
        return features + 0.1 * float(np.random.rand()), index % 10



def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(function, turns):
    def called(*args, **kwargs):
        nonlocal turns
        turns -= 1
        if turns < 0:
            die()
        return function(*args, **kwargs)

    return called


def run(job):
    if "sync" in job:
        os.fsync = die_before(os.fsync, job["sync"])
    torch.manual_seed(1)
    model = nn.Sequential(tiny.MLP(depth=2), nn.Dropout(0.3), nn.BatchNorm1d(10))
    steps = []

    def told(report):
        steps.append(report.step)
        if report.step - 1 == job.get("step"):
            die()

    torch.manual_seed(job["draws"])  # what else a process may have drawn before
    np.random.seed(job["draws"])
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    more = {"resume": job["resume"], "eval_loader": loader}
    if job.get("careful"):
        more = {
            "resume": "auto",
            "eval_loader": loader,
            "eval_every": 2,
            "metrics": {"accuracy": accuracy, "smallness": smallness},
            "keep_best": "smallness",
        }
    trained = fit(
        model,
        loader,
        loss=tiny.classify,
        lr=1e-1 if job.get("careful") else 1e-2,
        weight_decay=0.1,
        schedule="cosine",
        warmup_steps=3,
        max_grad_norm=1.0,
        epochs=EPOCHS,
        config={"optimizer": "adamw", "micro_batch_size": 2},
        device="cpu",
        callbacks=(told, stop_early) if job.get("careful") else (told,),
        output_dir=job["out"],
        checkpoint_every=job["every"],
        **more,
    )
    history = [(report.step, report.loss) for report in trained.history]
    found = [(each, each.step, each.metrics) for each in trained.evaluations]
    return {"steps": steps, "history": history, "evaluations": found}


def accuracy(outputs, batch):
    features, classes = batch
    return (outputs.argmax(-1) == classes).float().mean()


def smallness(model, loader):
    '''Of the weights, which only grow.'''
    assert not model.training
    assert len(loader) == 6
    return -sum(float(weight.norm()) for weight in model.parameters())


def stop_early(report):
    if report.evaluations:
        best = max(report.evaluations, key=lambda evaluation: evaluation.metrics["smallness"])
        if report.step - best.step > 8:
            return autofit.STOP


for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        found = run(job)
        with open(job["out"] + "/found", "w") as file:
            json.dump(found, file)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
STEPS = 24


class Runs:
    """Runs, one after the other, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, out: Path, *, resume: bool = False, every: int = 3, **how: Any) -> int:
        """How the run ended: 0, or the signal that killed it, negative."""
        assert self.process.stdin
        assert self.process.stdout
        job = {"out": str(out), "resume": resume, "every": every, "draws": int(resume), **how}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    script = tmp_path_factory.mktemp("runs") / "runs.py"
    script.write_text(RUNS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with warm.python(
        [str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Runs(process)
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The last weights of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    assert runs(out) == 0
    assert steps(out) == list(range(1, STEPS + 1))
    return weights(out)


def found_by(out: Path) -> dict[str, Any]:
    """What the last run there saw: its own steps, the whole history, and all evaluations."""
    found: dict[str, Any] = json.loads((out / "found").read_text())
    return found


def steps(out: Path) -> list[int]:
    own: list[int] = found_by(out)["steps"]
    return own


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model" / "model.safetensors")


def checkpoints(out: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")
    )


def assert_goes_on(runs: Runs, out: Path, first: int, wanted: dict[str, torch.Tensor]) -> None:
    """From what follows `first` steps to weights that are the same bit for bit."""
    assert runs(out, resume=True) == 0
    assert steps(out) == list(range(first + 1, STEPS + 1))
    found = weights(out)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
    assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.parametrize("step", sorted(random.Random(4).sample(range(3, STEPS), 3)))
def test_killed_in_a_step(
    runs: Runs, uninterrupted: dict[str, torch.Tensor], tmp_path: Path, step: int
) -> None:
    assert runs(tmp_path, step=step) == -signal.SIGKILL
    assert_goes_on(runs, tmp_path, step // 3 * 3, uninterrupted)


def test_killed_twice(runs: Runs, uninterrupted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert runs(tmp_path, step=8) == -signal.SIGKILL
    assert runs(tmp_path, resume=True, step=16) == -signal.SIGKILL
    assert_goes_on(runs, tmp_path, 15, uninterrupted)


SYNCS = 7  # of one checkpoint: its five files, itself, and the directory that it is renamed in


@pytest.mark.parametrize("sync", [0, *random.Random(5).sample(range(1, SYNCS), 2)])
def test_killed_while_a_checkpoint_is_written(
    runs: Runs, uninterrupted: dict[str, torch.Tensor], tmp_path: Path, sync: int
) -> None:
    """The third one: half of it lies there, and is neither loaded nor left."""
    assert runs(tmp_path, sync=2 * SYNCS + sync) == -signal.SIGKILL
    renamed = sync == SYNCS - 1
    assert checkpoints(tmp_path) == ([3, 6, 9] if renamed else [3, 6])
    assert bool(list((tmp_path / "checkpoints").glob(".*.part"))) is not renamed
    assert_goes_on(runs, tmp_path, 9 if renamed else 6, uninterrupted)


def test_the_newest_checkpoint_is_damaged(
    runs: Runs, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert runs(tmp_path, step=13) == -signal.SIGKILL
    assert checkpoints(tmp_path) == [9, 12]
    state = tmp_path / "checkpoints" / "step-00000012" / "state.json"
    state.write_bytes(state.read_bytes()[:-100])
    assert_goes_on(runs, tmp_path, 9, uninterrupted)
    assert checkpoints(tmp_path) == [21, 24]
    label = yaml.safe_load(
        (tmp_path / "checkpoints" / "step-00000024" / "checkpoint.yaml").read_text()
    )
    assert label["next_step"] == STEPS


@pytest.fixture(scope="module")
def careful(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates, stops early and keeps its best weights."""
    out = tmp_path_factory.mktemp("careful")
    assert runs(out, careful=True) == 0
    return out


def test_a_run_stops_early_with_its_best_weights_and_a_whole_answer(careful: Path) -> None:
    found = found_by(careful)
    last = found["steps"][-1]
    scores = {step: metrics["smallness"] for _, step, metrics in found["evaluations"]}
    best = max(scores, key=scores.__getitem__)
    assert [step for step, _ in found["history"]] == list(range(1, last + 1))
    assert last == best + 9 < STEPS
    assert list(scores) == [*range(2, last, 2), last]
    assert checkpoints(careful)[-1] == last, "one can go on from where it stopped"
    assert all(0 <= metrics["accuracy"] <= 1 for _, _, metrics in found["evaluations"])


@pytest.mark.parametrize("step", [3, 6])
def test_killed_and_started_again_by_the_same_call(
    runs: Runs, careful: Path, tmp_path: Path, step: int
) -> None:
    """`resume="auto"` serves both starts; what is evaluated, kept and told is whole after them."""
    assert runs(tmp_path, careful=True, step=step) == -signal.SIGKILL
    assert runs(tmp_path, careful=True) == 0
    mine = found_by(tmp_path)
    whole = found_by(careful)
    assert mine["steps"] == whole["steps"][step // 3 * 3 :]
    assert mine["history"] == whole["history"]
    assert mine["evaluations"] == whole["evaluations"]
    best = weights(careful)
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, best[name]), name
