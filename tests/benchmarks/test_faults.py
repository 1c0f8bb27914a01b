"""The harness of faults sees each promise that is broken, strikes where it is told to, and judges nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.faults import Fault, flip

# In a process of its own: counting what it asks the system for cannot be undone.
BREAKING = """
import json, os, subprocess, sys, tempfile, time
from pathlib import Path
import torch
from benchmarks.faults import tries
from benchmarks.faults.faults import Fault
from benchmarks.faults.sandbox import Sandbox

tries._GONE, tries.LIMIT = 0.2, 1.5
scratch = Path(sys.argv[1])
made = tries.Tries(Sandbox(scratch, scratch), names=())
made.fresh()

def look():
    for number in range(5):
        Path(f"file{number}").write_text("x")

def left():
    if os.fork() == 0:
        time.sleep(60)

ways = {
    "nothing": look,
    "a process": left,
    "shared memory": lambda: Path(f"/dev/shm/twin_{os.getpid()}").write_text("x"),
    "a temporary file": lambda: tempfile.mkstemp(),
    "run": lambda: made.canary.touch(),
    "too long": lambda: time.sleep(60),
}
found = {name: made.call(way).broken for name, way in ways.items()}
struck = made.call(look, Fault("kill", 0, 3))
names = sorted(each.name for each in (made.folder / "work").glob("file*"))
made.fresh()
struck = made.call(look, Fault("kill", 0, 3))
kept = sorted(each.name for each in (made.folder / "work").glob("file*"))
full = made.call(look, Fault("disk full", 0, 2), made.sandbox.fill) if made.sandbox.private else None
full_said = full.err if full else "No space left on device"

def forward(model):
    return model(torch.ones(1, 2))

def backward(made):
    made.sum().backward()

def step():
    backward(forward(torch.nn.Linear(2, 2)))

count = made.call(step).events[0]
raised = [made.call(step, Fault("device memory", 0, number)).err for number in range(count)]
places = [[name for name in ("forward", "backward") if f"in {name}\\n" in each] for each in raised]
print(json.dumps([found, struck.code, struck.broken, kept, full_said, sum(places, [])]))
"""


def test_what_is_broken_is_seen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BREAKING, str(tmp_path / "scratch")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found, code, broken, kept, full, places = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("nothing") == []
    words = {
        "a process": "processes are left",
        "shared memory": "left in /dev/shm: twin_",
        "run": "was run",
    }
    words |= {
        "a temporary file": "temporary files are left",
        "too long": "it went on for more than",
    }
    assert found.keys() == words.keys()
    assert not [name for name, word in words.items() if word not in " ".join(found[name])], found
    assert (code, broken, kept) == (-9, [], ["file0", "file1", "file2"])
    assert "No space left on device" in full
    assert [*dict.fromkeys(places)] == ["forward", "backward"], "inside steps, too"


@pytest.mark.parametrize("draw", range(8))
def test_a_damaged_file_is_another_and_the_same_each_time(tmp_path: Path, draw: int) -> None:
    file, whole, found = tmp_path / "file", bytes(range(1, 256)) * 4, set()
    for _ in range(2):
        file.write_bytes(whole)
        flip(file, draw)
        found.add(file.read_bytes())
    assert len(found) == 1
    assert found != {whole}


def test_a_fault_is_read_as_it_is_told() -> None:
    fault = Fault("disk full", 0, 17, 0.25, 4711)
    assert Fault.read(str(fault)) == fault
