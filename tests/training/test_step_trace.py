"""One training step written down: what opens, what it holds, and that an unfinished one leaves nothing."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.workload import Hyperparameters
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.loop import train
from autofit.training.step import train_step
from autofit.training.step_trace import SteadyStep, StepTrace
from tests import tiny


def built(hardware: Any = tiny.CPU) -> Setup:
    hyperparameters = Hyperparameters(lr=1e-3)
    return build(
        tiny.mlp_workload(), {"micro_batch_size": 2}, hardware, hyperparameters=hyperparameters
    )


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def run(setup: Setup, recorder: SteadyStep, steps: int) -> None:
    batch = setup.workload.batch(setup.workload.effective_batch_size)
    with recorder:
        train(setup, [batch] * steps, steps=steps, callbacks=(recorder,))


def test_one_step_is_recorded_and_no_more(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "new", "cpu")
    recorder = SteadyStep(trace)
    run(built(), recorder, 5)
    assert recorder.done
    written = {
        "step_trace.json.gz": "trace",
        "step_operators.txt": "operators",
        "tensorboard": "tensorboard",
    }
    assert set(trace.files) == set(written.values())
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(written)
    events = events_of(trace.files["trace"])
    assert trace.files["tensorboard"].name.endswith(".pt.trace.json.gz")
    assert events_of(trace.files["tensorboard"]) == events
    table = trace.files["operators"].read_text()
    assert "aten::addmm" in table
    assert "CPU Mem" in table
    updates = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]
    assert len(updates) == 1
    assert any(event.get("name") == "[memory]" for event in events)
    assert trace.message.startswith(
        f"one step was recorded: {trace.files['trace']} (for ui.perfetto.dev), "
    )


def test_the_profiler_tells_nothing_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: libkineto reads its level once, when it is first used."""
    code = f"""
import torch
from pathlib import Path
from autofit.training.step_trace import StepTrace
trace = StepTrace(Path({str(tmp_path)!r}), "cpu")
trace.begin()
torch.ones(4).sum()
trace.end()
"""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_training_that_ends_before_leaves_nothing_and_the_next_can_be_recorded(
    tmp_path: Path, steps: int
) -> None:
    trace = StepTrace(tmp_path, "cpu")
    recorder = SteadyStep(trace)
    run(built(), recorder, steps)
    assert not recorder.done
    assert not trace.files
    again = SteadyStep(trace)
    run(built(), again, 3)
    assert again.done
    assert trace.files


def test_an_error_within_the_step_is_not_hidden(tmp_path: Path) -> None:
    setup, trace = built(), StepTrace(tmp_path, "cpu")

    def fail(report: Any) -> None:
        if report.step == 2:  # the recording of the third has begun
            raise KeyError("of a callback")

    batch = setup.workload.batch(4)
    with pytest.raises(KeyError, match="of a callback"), SteadyStep(trace) as recorder:
        train(setup, [batch] * 4, steps=4, callbacks=(recorder, fail))
    assert not trace.files


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = StepTrace(tmp_path, "cpu")
    (tmp_path / "step_trace.json.gz").write_text("of before")

    def full(self: Any, path: str) -> None:
        Path(path).write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    trace.begin()
    with pytest.raises(OSError, match="no space left"):
        trace.end()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of before"]


@pytest.mark.gpu
def test_on_cuda_there_is_a_snapshot_with_the_places_of_weights_and_of_the_step(
    tmp_path: Path,
) -> None:
    trace = StepTrace(tmp_path, "cuda")
    with trace.recording_allocations():
        setup = built(detect("cuda"))
        batch = setup.workload.batch(4)
        train_step(setup, batch)
        trace.begin()
        train_step(setup, batch)
        trace.end()
    assert set(trace.files) == {"trace", "operators", "tensorboard", "memory_snapshot"}
    snapshot = pickle.loads(trace.files["memory_snapshot"].read_bytes())
    assert snapshot["segments"]
    traced = [
        event
        for device in snapshot["device_traces"]
        for event in device
        if event["action"] == "alloc"
    ]
    assert any(
        frame["filename"].endswith("build.py") for event in traced for frame in event["frames"]
    )
    kernels = [event for event in events_of(trace.files["trace"]) if event.get("cat") == "kernel"]
    assert kernels
