"""The watch inside of a tool's process: what each step takes, without autofit being imported there."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autofit.hardware.step_watch as step_watch

WATCH = Path(step_watch.__file__).with_name("watch")
TRAINING = """
import sys
import torch
model = torch.nn.Linear(1000, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(9):
    model(torch.ones(10, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not [name for name in sys.modules if name.startswith("autofit")]
print("went on")
"""
MATRIX = 4_000_000  # bytes of weights, of their gradient, and of the momentum


def trained(folder: Path, **told: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """A process that trains, and the lines of its steps."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PYTHONPATH": str(WATCH), "WATCHED_STEPS": str(folder), **told}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    path = folder / "rank0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return done, [json.loads(line) for line in lines]


def test_each_step_is_a_line_and_the_last_one_ends_the_process(tmp_path: Path) -> None:
    done, steps = trained(tmp_path, WATCHED_TRACKED="2", WATCHED_LAST="4")
    assert done.returncode == 0, done.stderr
    assert "went on" not in done.stdout
    assert [step["tracked"] for step in steps] == [True, True, False, False]
    assert 3 * MATRIX <= steps[1]["peak_bytes"] < 3.2 * MATRIX
    assert steps[1]["state_bytes"] == MATRIX
    assert steps[0]["micro_batches"] == 1
    assert all(step["seconds"] > 0 for step in steps)


def test_all_steps_are_counted_unless_told_otherwise(tmp_path: Path) -> None:
    done, steps = trained(tmp_path)
    assert "went on" in done.stdout
    assert [step["tracked"] for step in steps] == [True] * 9


def test_a_process_far_over_its_cap_ends_and_says_so(tmp_path: Path) -> None:
    done, steps = trained(tmp_path, WATCHED_CAP=str(MATRIX // 2))
    assert done.returncode == 1
    assert steps == [{"out_of_memory": True}]


@pytest.mark.slow
def test_steps_that_compile_are_recorded_together(tmp_path: Path) -> None:
    told = {"WATCHED_COMPILES": "1", "WATCHED_TRACKED": "3", "WATCHED_LAST": "4"}
    done, steps = trained(tmp_path, **told)
    assert done.returncode == 0, done.stderr
    assert [step["peak_bytes"] is None for step in steps] == [True, True, False, True]
    assert 3 * MATRIX <= steps[2]["peak_bytes"] < 3.2 * MATRIX


def test_living_bytes_are_of_tensors_without_their_gradients() -> None:
    gone = weakref.proxy(torch.nn.Linear(2, 2))  # which cannot be asked what it is
    before = step_watch.living_bytes()
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.sum().backward()
    with FakeTensorMode():
        fake = torch.ones(1000)  # as compilers keep
    assert fake.numel() == 1000
    assert step_watch.living_bytes() - before == 4000
    with pytest.raises(ReferenceError):
        isinstance(gone, torch.Tensor)
