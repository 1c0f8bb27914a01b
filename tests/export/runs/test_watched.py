"""A command that is watched: what it says, what it took, and that nothing of it is left."""

import os
import sys
import time
from pathlib import Path

import pytest

from autofit.export.runs.watched import Watch, run_watched

STEPS = """
import torch
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
print("that was all")
raise SystemExit(5)
"""
CHILD = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
Path("child").write_text(str(child.pid))
time.sleep(100)
"""


def test_its_steps_its_words_and_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STEPS]
    watched = run_watched(command, tmp_path, {}, watch=Watch(), seconds=100)
    assert watched.code == 5
    assert [len(rank) for rank in watched.ranks] == [2]
    assert "that was all" in watched.said
    assert not watched.out_of_memory


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", CHILD]
    watched = run_watched(command, tmp_path, {}, watch=Watch(), seconds=3)
    assert watched.code is None
    assert watched.ranks == ()

    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, 9)
    pytest.fail("the child lives on")


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        run_watched(["/nowhere"], tmp_path, {}, watch=Watch(), seconds=3)
