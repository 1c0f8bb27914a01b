"""Which errors mean that memory ran out."""

import resource

import pytest
import torch

from autofit.core.hardware import GIB, MIB
from autofit.memory.tracker import BudgetExceededError
from autofit.probe.limits import guard_cpu, is_device_out_of_memory, is_host_out_of_memory, peak_resident_bytes


def too_much() -> Exception:
    """What PyTorch's CPU allocator raises in fact: a plain RuntimeError."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


def test_each_kind_of_out_of_memory_is_told_from_the_other() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), BudgetExceededError()):
        assert is_device_out_of_memory(error)
        assert not is_host_out_of_memory(error)
    for error in (MemoryError(), too_much(), OSError(12, "Cannot allocate memory")):
        assert is_host_out_of_memory(error)
        assert not is_device_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), OSError("no such file"), ValueError("memory")])
def test_other_errors_are_none_of_them(error: Exception) -> None:
    assert not is_device_out_of_memory(error)
    assert not is_host_out_of_memory(error)


def test_the_guard_stands_above_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    guard_cpu(2 * GIB)
    ((limit, hard),) = asked
    assert limit > 3 * GIB
    assert hard == resource.getrlimit(resource.RLIMIT_DATA)[1]


def test_the_guard_never_asks_for_more_than_the_system_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5 * MIB, 7 * MIB))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    guard_cpu(2 * GIB)
    assert asked == [(7 * MIB, 7 * MIB)]


def test_the_resident_peak_is_of_this_process() -> None:
    before = peak_resident_bytes()
    assert before > 10 * MIB
    block = bytearray(b"x") * (2 * before)
    assert peak_resident_bytes() > 2 * before
    del block
    assert peak_resident_bytes() > 2 * before
