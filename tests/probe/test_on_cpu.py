"""A probe on the CPU: who counts."""

import resource
from pathlib import Path
from typing import Any

import pytest

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.hardware import GIB, MIB
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.probe import Plan, on_cpu
from autofit.probe.steps import Request
from tests import tiny


@pytest.mark.parametrize(
    ("compiled", "watch"), [("default", AllocationRecord), ("none", StorageTracker)]
)
def test_what_compiles_is_watched_through_the_allocator(
    monkeypatch: pytest.MonkeyPatch, compiled: str, watch: type[Any]
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(on_cpu, "guard_cpu", limits.append)
    workload = tiny.transformer_workload(4)
    config = techniques.canonicalize({"compile": compiled}, workload, tiny.CPU)
    probe = on_cpu.CpuProbe(workload, Request(config, tiny.CPU, Budget(GIB, GIB), Plan()))
    assert isinstance(probe.watch, watch)
    assert limits == [1.5 * GIB]  # so that a near miss is told in bytes


def test_the_guard_stands_above_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    on_cpu.guard_cpu(2 * GIB)
    ((limit, hard),) = asked
    assert limit > 3 * GIB
    assert hard == resource.getrlimit(resource.RLIMIT_DATA)[1]


def test_the_guard_never_asks_for_more_than_the_system_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5 * MIB, 7 * MIB))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    on_cpu.guard_cpu(2 * GIB)
    assert asked == [(7 * MIB, 7 * MIB)]


def test_a_system_that_does_not_tell_the_size_of_a_process_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Path, "read_text", lambda path, encoding: "Name:\tpython\nVmRSS:\t1024 kB\n"
    )
    with pytest.raises(OSError, match="/proc/self/status has no VmData"):
        on_cpu.guard_cpu(2 * GIB)
