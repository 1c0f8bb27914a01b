"""The guard of the machine, and what a process has used."""

import resource

import psutil
import pytest

from autofit.core.hardware import GIB, MIB
from autofit.probe.limits import guard_cpu, peak_resident_bytes


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
    free = before - psutil.Process().memory_info().rss  # of what it once held
    block = bytearray(b"x") * (free + 256 * MIB)
    grown = peak_resident_bytes()
    assert before + 128 * MIB < grown < before + 384 * MIB
    del block
    assert peak_resident_bytes() >= grown
