"""The storage tracker counts what torch's own profiler counts, byte for byte, the same on every run."""

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from autofit.core.workload import Workload
from autofit.hardware.tracker import BudgetExceededError, StorageTracker
from tests import tiny

WORKLOADS = {
    "mlp": tiny.mlp_workload(),
    "transformer": tiny.transformer_workload(),
    "llama": tiny.llama_workload(),
    "convolutions": tiny.conv_workload(),
}
MIB = 2**20


def two_steps(workload: Workload) -> None:
    """Two steps of a training loop as one writes it by hand, the model's making included."""
    model = workload.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        batch = workload.batch(4)
        output = workload.loss(model, batch) if workload.loss else model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tracked(function: Callable[[], object]) -> StorageTracker:
    with StorageTracker() as tracker:
        function()
    return tracker


def profiled_peak(function: Callable[[], None]) -> int:
    """The peak by the allocator's own events."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        function()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", ["mlp", "transformer", "llama"])
def test_the_peak_is_that_of_the_allocators_events(name: str) -> None:
    workload = WORKLOADS[name]
    two_steps(workload)  # what a first use keeps for good is no part of it
    assert tracked(lambda: two_steps(workload)).peak == profiled_peak(lambda: two_steps(workload))


def test_only_memory_inside_kernels_is_missed() -> None:
    """Convolutions on the CPU reorder their inputs in memory of their own."""
    workload = WORKLOADS["convolutions"]
    seen = tracked(lambda: two_steps(workload)).peak
    assert (
        0.8 * profiled_peak(lambda: two_steps(workload))
        < seen
        <= profiled_peak(lambda: two_steps(workload))
    )


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_two_runs_have_the_same_peak(workload: Workload) -> None:
    two_steps(workload)
    peaks = {tracked(lambda: two_steps(workload)).peak for _ in range(3)}
    assert len(peaks) == 1


def test_everything_that_was_made_inside_is_gone_at_the_end() -> None:
    tracker = tracked(lambda: two_steps(WORKLOADS["mlp"]))
    gc.collect()
    assert tracker.live == 0
    assert tracker.peak > 0


def test_views_share_the_storage_of_what_they_look_at() -> None:
    with StorageTracker() as tracker:
        base = torch.zeros(MIB // 4)
        views = [
            base.view(2, -1),
            base[10:20],
            base.t(),
            base.detach(),
            base.unsqueeze(0).expand(8, -1),
        ]
        assert tracker.live == tracker.peak == MIB
        del base
        assert tracker.live == MIB
        del views
        assert tracker.live == 0
    assert tracker.peak == MIB


def test_what_is_freed_is_not_counted_any_more() -> None:
    with StorageTracker() as tracker:
        first = torch.zeros(MIB, dtype=torch.uint8)
        del first
        second = torch.zeros(MIB // 2, dtype=torch.uint8)
    assert (tracker.live, tracker.peak) == (MIB // 2, MIB)
    del second
    assert tracker.live == 0


def test_tensors_from_before_are_counted_when_they_are_used() -> None:
    before, unused = torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB)
    with StorageTracker() as tracker:
        total = before.sum()
        assert tracker.live == MIB + total.nbytes
    del unused


def test_a_module_from_before_can_be_shown() -> None:
    model = nn.BatchNorm1d(5)
    with StorageTracker() as tracker:
        tracker.see([*model.parameters(), *model.buffers()])
        tracker.see([*model.parameters(), *model.buffers()])
    assert tracker.live == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_the_peak_can_be_forgotten() -> None:
    with StorageTracker() as tracker:
        tensors = torch.zeros(100, dtype=torch.uint8)
        torch.zeros(1000, dtype=torch.uint8)
        assert tracker.peak == 1100
        tracker.reset_peak()
        assert tracker.peak == tracker.live == 100
    del tensors


def test_storage_that_grows_is_counted_at_its_new_size() -> None:
    with StorageTracker() as tracker:
        tensor = torch.zeros(10, dtype=torch.uint8)
        tensor.resize_(1000)
        assert tracker.live == 1000


def test_passing_the_limit_raises_at_that_operator_and_not_before() -> None:
    tensors = []
    with pytest.raises(BudgetExceededError), StorageTracker(limit=3 * MIB) as tracker:
        for _ in range(10):
            tensors.append(torch.zeros(MIB, dtype=torch.uint8))  # noqa: PERF401 - they stay up to the error
    assert len(tensors) == 3
    assert tracker.peak == 4 * MIB


def test_exactly_the_limit_is_allowed() -> None:
    with StorageTracker(limit=MIB) as tracker:
        tensor = torch.zeros(MIB, dtype=torch.uint8)
    assert tracker.live == tensor.nbytes


def test_the_meta_device_takes_nothing() -> None:
    assert tracked(lambda: torch.zeros(MIB, device="meta") + 1).peak == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=30))
@settings(deadline=None)
def test_any_course_of_making_and_dropping(course: list[tuple[int, int]]) -> None:
    held: dict[int, torch.Tensor] = {}
    live = peak = 0
    with StorageTracker() as tracker:
        for place, size in course:
            held.pop(place, None)
            live = sum(tensor.numel() for tensor in held.values())
            held[place] = torch.zeros(size, dtype=torch.uint8)
            live += size
            peak = max(peak, live)
            assert tracker.live == live
    assert tracker.peak == peak


class Pair(torch.Tensor):
    """A wrapper subclass as quantised weights are: its own storage is empty, two inner tensors hold the bytes."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: object, stride: object
    ) -> "Pair":
        return Pair(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: tuple = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].codes, args[0].scales)
        return NotImplemented


def test_a_wrapper_is_counted_by_what_it_wraps() -> None:
    pair = Pair(torch.zeros(1000, dtype=torch.uint8), torch.zeros(10))
    with StorageTracker() as tracker:
        tracker.see(nn.Parameter(pair, requires_grad=False))
    assert tracker.live == 1000 + 40


def test_a_wrapper_inside_a_wrapper() -> None:
    outer = Pair(Pair(torch.zeros(1000, dtype=torch.uint8), torch.zeros(10)), torch.zeros(5))
    with StorageTracker() as tracker:
        tracker.see(nn.Parameter(outer, requires_grad=False))
    assert tracker.live == 1000 + 40 + 20


def test_sparse_gradients_are_counted_by_their_parts() -> None:
    with StorageTracker() as tracker:
        embedding = nn.Embedding(100, 4, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        gc.collect()
        parts = embedding.weight.grad._indices().nbytes + embedding.weight.grad._values().nbytes
    assert parts == 2 * 8 + 2 * 4 * 4
    assert tracker.live == embedding.weight.nbytes + parts


def test_fake_tensors_count_what_real_ones_would() -> None:
    workload = WORKLOADS["transformer"]
    with FakeTensorMode():
        fake = tracked(lambda: two_steps(workload)).peak
    assert fake == tracked(lambda: two_steps(workload)).peak
