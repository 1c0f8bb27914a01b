"""A probe on the CPU: who counts."""

from typing import Any

import pytest

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.hardware import GIB
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.probe import Plan, on_cpu
from autofit.probe.steps import Request
from tests import tiny


@pytest.mark.parametrize(("compiled", "watch"), [("default", AllocationRecord), ("none", StorageTracker)])
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
