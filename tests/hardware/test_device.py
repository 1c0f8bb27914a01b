"""Detection: the facts of the CPU here, of a card where there is one, and one sentence where there is none."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB, MIB
from autofit.hardware import device


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu() -> None:
    hardware = device.detect("cpu")
    assert hardware.device == "cpu"
    assert hardware.name
    assert 0 < hardware.memory_bytes == hardware.host_memory_bytes <= psutil.virtual_memory().total
    assert 0 < hardware.host_free_bytes <= hardware.host_memory_bytes
    assert hardware.cores == len(os.sched_getaffinity(0))
    assert (hardware.capability, hardware.context_bytes, hardware.world) == (None, 0, 1)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_it_is_the_cpu_unless_cuda_was_asked_for() -> None:
    assert device.detect().device == "cpu"
    with pytest.raises(ProbeError, match="there is no CUDA device here") as caught:
        device.detect("cuda")
    assert "--device cpu --mem" in caught.value.remedy


def test_a_cpu_without_a_name_is_called_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert device.detect("cpu").name == os.uname().machine


CARD, OTHER = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What nvidia-smi says, on a machine whose card 0 is CARD to CUDA."""

    def set_up(text: str, code: int = 0, name: str = "NVIDIA L4") -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
            assert "--query-gpu=uuid,memory.used" in command
            return subprocess.CompletedProcess(command, code, stdout=text)

        properties = SimpleNamespace(name=name, uuid=CARD, major=8, minor=9)
        monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(device.subprocess, "run", run)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return set_up


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"GPU-{CARD}, 512\n", 512 * MIB),
        # by the bus, where CUDA numbers by speed
        (f"GPU-{OTHER}, 9\nGPU-{CARD}, 512\n", 512 * MIB),
        (f"GPU-{OTHER}, 9\n", 0),
        (f"GPU-{CARD}, [N/A]\n", 0),  # where memory is the host's as well
        ("No devices were found\n", 0),
        ("", 0),
    ],
)
def test_what_others_hold_is_asked_of_the_driver(
    smi: Callable[..., None], answer: str, expected: int
) -> None:
    smi(answer)
    assert device.used_bytes_without_context() == expected


def test_a_driver_that_reports_a_failure_counts_as_nothing_used(smi: Callable[..., None]) -> None:
    smi(f"GPU-{CARD}, 512\n", code=9)
    assert device.used_bytes_without_context() == 0


def test_what_is_held_of_a_whole_card_is_not_held_of_an_instance(smi: Callable[..., None]) -> None:
    smi(f"GPU-{CARD}, 512\n", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert device.used_bytes_without_context() == 0


@pytest.mark.parametrize("error", [OSError(), subprocess.TimeoutExpired("nvidia-smi", 30)])
def test_a_driver_that_does_not_answer_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device.subprocess, "run", fail)
    assert device.used_bytes_without_context() == 0


@pytest.mark.parametrize(("held", "used"), [(3000, 3000), (20, 0)], ids=["in use", "idle"])
def test_memory_in_use_is_that_of_others_without_the_context(
    smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, held: int, used: int
) -> None:
    smi(f"GPU-{CARD}, {held}\n")
    total, reserved, context = 22 * GIB, 2 * MIB, 300 * MIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (total - held * MIB - reserved - context, total)
    )
    taken = iter([0, reserved])  # nothing, until the card is opened
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: next(taken))
    monkeypatch.setattr(device, "host_link", lambda name: 25e9)
    found = device.detect()
    assert found.host_link == 25e9
    assert (found.name, found.capability, found.memory_bytes) == ("NVIDIA L4", (8, 9), total)
    assert (found.used_bytes, found.context_bytes) == (used * MIB, context)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "the card is full before autofit has taken any of it.",
        ),
        (
            RuntimeError("CUDA error: busy\nFor debugging"),
            "the card cannot be used: CUDA error: busy.",
        ),
    ],
    ids=["full", "busy"],
)
def test_a_card_that_cannot_be_used_is_an_error(
    smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def fails(*_: object) -> None:
        raise raised

    smi(f"GPU-{CARD}, 81000\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    monkeypatch.setattr(device, "open_card", fails)
    with pytest.raises(ProbeError) as caught:
        device.detect("cuda")
    assert caught.value.message == message


@pytest.mark.parametrize("asked", ["cuda", None])
def test_a_card_of_amds_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(
        ProbeError, match=r"AMD's cards \(ROCm\), which autofit does not support"
    ) as caught:
        device.detect(asked)
    assert "--device cpu" in caught.value.remedy
    assert device.detect("cpu").device == "cpu"


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
    ("named", "count", "cards"),
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
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, cards: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device.visible_cards() == cards
