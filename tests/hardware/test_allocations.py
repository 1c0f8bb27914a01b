"""The record of allocations says what the storage tracker says, and goes on where that cannot: in compiled code."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autofit.core.workload import Workload
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.techniques import compile as technique_file
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny

MIB = 2**20


def two_steps(workload: Workload, **knobs: object) -> None:
    setup = build(workload, knobs, tiny.CPU)
    batch = workload.batch(workload.effective_batch_size)
    for _ in range(2):
        train_step(setup, batch)
    setup.close()


def recorded(action: Callable[[], None]) -> int:
    with AllocationRecord() as record:
        action()
    return record.peak


@pytest.mark.parametrize(
    "workload", [tiny.transformer_workload(), tiny.llama_workload()], ids=["plain", "llama"]
)
@pytest.mark.parametrize(
    "knobs",
    [{}, {"optimizer": "sgd", "micro_batch_size": 2}, {"activation_checkpointing": "full"}],
    ids=str,
)
def test_it_is_the_storage_trackers_peak(workload: Workload, knobs: dict[str, object]) -> None:
    with StorageTracker() as tracker:
        two_steps(workload, **knobs)
    assert recorded(lambda: two_steps(workload, **knobs)) == pytest.approx(tracker.peak, rel=0.01)


def test_it_sees_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph run as captured: what it keeps and frees differs a little from plain code."""
    monkeypatch.setattr(technique_file, "BACKEND", "aot_eager")
    workload = tiny.transformer_workload()
    plain = recorded(lambda: two_steps(workload))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert recorded(lambda: two_steps(workload, compile="default")) == pytest.approx(
        plain, rel=0.05
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_bytes_allocated_before_do_not_count() -> None:
    before = torch.zeros(3 * MIB, dtype=torch.uint8)
    with AllocationRecord() as first:
        inside = torch.zeros(2 * MIB, dtype=torch.uint8)
    with AllocationRecord() as second:
        torch.zeros(MIB, dtype=torch.uint8)
    assert (first.peak, second.peak) == (2 * MIB, MIB)
    del before, inside


def test_a_block_without_tensors_has_no_peak() -> None:
    with AllocationRecord() as record:
        pass
    assert record.peak == 0


def test_the_peak_is_known_after_an_error_too() -> None:
    record = AllocationRecord()
    with pytest.raises(RuntimeError, match="in the middle"), record:
        nn.Linear(256, 1024, bias=False)
        raise RuntimeError("in the middle")
    assert record.peak >= MIB


@pytest.mark.slow
def test_it_sees_what_inductor_makes() -> None:
    """Fused kernels keep less: their peak is below plain code's, and holds weights, gradients and state at least."""
    workload = tiny.transformer_workload()
    plain = recorded(lambda: two_steps(workload))
    weights = sum(parameter.numel() * 4 for parameter in workload.model().parameters())
    assert 4 * weights < recorded(lambda: two_steps(workload, compile="default")) < 1.05 * plain


def test_garbage_of_an_earlier_record_takes_nothing_from_the_peak(
    request: pytest.FixtureRequest,
) -> None:
    gc.disable()
    request.addfinalizer(gc.enable)
    with AllocationRecord():
        cycle: list[object] = [torch.empty(2**20)]
    cycle.append(cycle)
    del cycle
    with AllocationRecord() as record:
        first = torch.empty(16)
        gc.collect()  # as it may happen at any time
        second = torch.empty(1024)
    assert record.peak == first.nbytes + second.nbytes
