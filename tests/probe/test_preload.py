"""Imports that ask for the card do not open it in the process that will fork; where they must, that is told."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

ASKING = """
import torch
cards = torch.cuda.device_count()
capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
device = torch.cuda.current_device()
"""

# Forks a process for each case: torch is imported once, and no library asks before.
SCRIPT = """
import json
import os
import sys
from types import SimpleNamespace
import torch
from autofit.probe.preload import preload

def case(card, *names):
    mother, opened = os.getpid(), []

    def properties(device=None):
        if os.getpid() == mother:
            opened.append(device)
        if card == "broken":
            raise RuntimeError("this card cannot be opened")
        return SimpleNamespace(major=9, minor=0, name="a card", uuid=object(), total_memory=2**34)

    def available():
        # As without NVML, or with instances of a card (MIG): asking opens CUDA.
        if os.getpid() == mother:
            opened.append("asked")
        return card != "none"

    torch.cuda.is_available = available
    torch.cuda.device_count = lambda: int(available())
    torch.cuda.is_initialized = lambda: bool(opened)
    torch.cuda.get_device_properties = properties
    usable = preload(names)
    asking = sys.modules.get("asking")
    told = asking and (asking.cards, asking.capability, asking.device)
    print(json.dumps([usable, bool(opened), told, torch.cuda.get_device_properties is properties]), flush=True)

for line in sys.stdin:
    if not os.fork():
        case(*json.loads(line))
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path_factory.mktemp("asking")
    (folder / "asking.py").write_text(ASKING)
    (folder / "broken.py").write_text("raise RuntimeError('it does not suit this torch')")
    command = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def run(cases: subprocess.Popen[str], card: str, *names: str) -> list[object]:
    """Whether children can use the device; whether it was opened; what the module that asks was told; whether torch's
    functions are themselves again."""
    assert cases.stdin
    assert cases.stdout
    cases.stdin.write(json.dumps([card, *names]) + "\n")
    cases.stdin.flush()
    told: list[object] = json.loads(cases.stdout.readline())
    return told


def test_a_library_that_asks_is_told_what_a_child_saw(cases: subprocess.Popen[str]) -> None:
    assert run(cases, "whole", "asking") == [True, False, [1, [9, 0], 0], True]


def test_without_a_card_that_is_told_too(cases: subprocess.Popen[str]) -> None:
    assert run(cases, "none", "asking") == [True, False, [0, None, 0], True]


def test_a_card_that_no_child_can_open_is_noticed_though_nobody_asks(
    cases: subprocess.Popen[str],
) -> None:
    assert run(cases, "broken", "json") == [False, False, None, True]


def test_an_import_that_fails_on_a_card_that_no_child_can_open_is_noticed_too(
    cases: subprocess.Popen[str],
) -> None:
    assert run(cases, "broken", "asking")[:2] == [False, True]


def test_a_library_that_cannot_be_imported_is_left_to_the_probe_that_needs_it(
    cases: subprocess.Popen[str],
) -> None:
    assert run(cases, "none", "broken", "asking") == [True, False, [0, None, 0], True]
