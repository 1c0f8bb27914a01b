"""Detection: the facts of the CPU here, of a card where there is one, and one sentence where there is none."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB, MIB
from autofit.memory import device


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu() -> None:
    hardware = device.detect("cpu")
    assert hardware.device == "cpu"
    assert hardware.name
    assert hardware.memory_bytes == hardware.host_memory_bytes == psutil.virtual_memory().total
    assert 0 < hardware.host_free_bytes <= hardware.host_memory_bytes
    assert hardware.cores == len(os.sched_getaffinity(0))
    assert (hardware.capability, hardware.context_bytes, hardware.ranks) == (None, 0, 1)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_it_is_the_cpu_unless_cuda_was_asked_for() -> None:
    assert device.detect().device == "cpu"
    with pytest.raises(ProbeError, match="there is no CUDA device here") as caught:
        device.detect("cuda")
    assert "--device cpu --mem" in caught.value.remedy


def test_a_cpu_without_a_name_is_called_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert device.detect("cpu").name == os.uname().machine


def answering(text: str, code: int = 0, seen: list | None = None) -> object:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        if seen is not None:
            seen.extend(command)
        return subprocess.CompletedProcess(command, code, stdout=text)

    return run


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(answering("512\n"), 512 * MIB), (answering("[N/A]\n"), 0), (answering("", code=9), 0), (answering("1\n", 2), 0)],
)
def test_what_others_hold_is_asked_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, answer: object, expected: int
) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device.subprocess, "run", answer)
    assert device.used_bytes_without_context() == expected


@pytest.mark.parametrize("error", [OSError(), subprocess.TimeoutExpired("nvidia-smi", 30)])
def test_a_driver_that_does_not_answer_is_no_failure(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device.subprocess, "run", fail)
    assert device.used_bytes_without_context() == 0


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("2,3", "2"), ("GPU-1234", "GPU-1234"), ("", "0")])
def test_the_card_asked_about_is_the_first_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    monkeypatch.setattr(device.subprocess, "run", answering("1", seen=seen))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device.used_bytes_without_context()
    assert f"--id={asked}" in seen


def test_without_nvidia_smi_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.used_bytes_without_context() == 0


@pytest.mark.gpu
def test_a_card() -> None:
    hardware = device.detect()
    assert hardware.device == "cuda"
    assert hardware.name == torch.cuda.get_device_properties(0).name
    assert hardware.memory_bytes == torch.cuda.mem_get_info(0)[1]
    assert hardware.capability == torch.cuda.get_device_capability(0)
    assert 0 <= hardware.context_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("told", "count", "cards"),
    [
        (None, 3, ("0", "1", "2")),
        ("2,3", 2, ("2", "3")),
        ("GPU-5a1, GPU-7b2", 2, ("GPU-5a1", "GPU-7b2")),
        ("1,-1,0", 1, ("1",)),  # CUDA sees none of what follows one that is not there
        ("", 0, ()),
        ("MIG-1f,MIG-2e", 1, ("MIG-1f", "MIG-2e")),  # of instances of a card a process sees but one
    ],
)
def test_the_visible_cards_by_the_names_they_were_made_visible_by(
    monkeypatch: pytest.MonkeyPatch, told: str | None, count: int, cards: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device.visible_cards() == cards
