"""Imports that ask for the card do not open it in the process that will fork; where they must, that is told."""

import subprocess
import sys
from pathlib import Path

ASKING = """
import torch
cards = torch.cuda.device_count()
capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
device = torch.cuda.current_device()
"""

SCRIPT = """
import os
import sys
from types import SimpleNamespace
import torch

mother, opened = os.getpid(), []

def properties(device=None):
    if os.getpid() == mother:
        opened.append(device)
    if sys.argv[1] == "broken":
        raise RuntimeError("this card cannot be opened")
    return SimpleNamespace(major=9, minor=0, name="a card", uuid=object(), total_memory=2**34)

def available():
    # As without NVML, or with instances of a card (MIG): asking opens CUDA.
    if os.getpid() == mother:
        opened.append("asked")
    return sys.argv[1] != "none"

torch.cuda.is_available = available
torch.cuda.device_count = lambda: int(available())
torch.cuda.is_initialized = lambda: bool(opened)
torch.cuda.get_device_properties = properties
from autofit.probe.preload import preload
print(preload(sys.argv[2:]), bool(opened))
asking = sys.modules.get("asking")
print(asking and (asking.cards, asking.capability, asking.device), torch.cuda.get_device_properties is properties)
"""


def run(folder: Path, card: str, *names: str) -> list[str]:
    (folder / "asking.py").write_text(ASKING)
    command = [sys.executable, "-c", SCRIPT, card, *names]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.splitlines()


def test_a_library_that_asks_is_told_what_a_child_saw(tmp_path: Path) -> None:
    assert run(tmp_path, "whole", "asking") == ["True False", "(1, (9, 0), 0) True"]


def test_without_a_card_that_is_told_too(tmp_path: Path) -> None:
    assert run(tmp_path, "none", "asking") == ["True False", "(0, None, 0) True"]


def test_a_card_that_no_child_can_open_is_noticed_though_nobody_asks(tmp_path: Path) -> None:
    assert run(tmp_path, "broken", "json") == ["False False", "None True"]


def test_an_import_that_fails_on_a_card_that_no_child_can_open_is_noticed_too(tmp_path: Path) -> None:
    assert run(tmp_path, "broken", "asking")[0] == "False True"
