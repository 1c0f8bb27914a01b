"""A model of many like blocks is followed by few of them, and predicted as if it had been whole."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.estimator import estimate_of
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.resting import resting_of
from autofit.estimate.skeleton import Depths
from autofit.estimate.timeline import timeline_of
from autofit.estimate.trace import trace
from autofit.hardware.caching_allocator import SMALL_SEGMENT
from tests.estimate.traced import AMPERE
from tests.tiny import CPU, llama_workload

BLOCKS = 17
FEW = Depths(13, 8, 12)
FSDP = {"data_parallel": "fsdp", "precision": "bf16-mixed", "micro_batch_size": 1}
CASES: list[tuple[Hardware, dict[str, Any]]] = [
    (CPU, {}),
    (AMPERE, {"micro_batch_size": 1, "activation_checkpointing": "full", "precision": "bf16"}),
    (AMPERE, {"micro_batch_size": 2, "activation_checkpointing": "alternate"}),
    (AMPERE, {"optimizer_in_backward": True, "loss": "chunked"}),
    (AMPERE, {"activation_offload": "cpu", "optimizer_offload": "cpu", "micro_batch_size": 2}),
    (replace(AMPERE, devices=2), FSDP),
]


@pytest.mark.parametrize(("hardware", "knobs"), CASES)
def test_few_blocks_tell_the_figures_of_all_to_the_byte(
    hardware: Hardware, knobs: Mapping[str, Any]
) -> None:
    workload = llama_workload(num_hidden_layers=BLOCKS)
    whole = trace(workload, knobs, hardware, depths=None)
    few = trace(workload, knobs, hardware, depths=FEW)
    assert whole.shallower is None
    assert few.shallower is not None
    assert len(few.events) < len(whole.events)

    estimates = []
    for traced in (whole, few):
        found = estimate_of(traced, workload, hardware, rates=UNKNOWN, calibration=None)
        estimates.append(asdict(found))
    expected, found = estimates
    bounds = ("low", "high", "reserved_bytes")  # of what an allocator reserves, by whole segments
    seconds = ("step_seconds", "samples_per_second", "tokens_per_second", "utilisation")
    for name, value in expected.items():
        if name in seconds:
            assert found[name] == pytest.approx(value, rel=1e-6)
        elif name in bounds and value is not None and hardware is not CPU:
            assert found[name] == pytest.approx(value, rel=0.02, abs=SMALL_SEGMENT)
        else:
            assert found[name] == value, name
    resting = [resting_of(traced, workload, hardware) for traced in (whole, few)]
    assert resting[0] == resting[1]


def test_the_timeline_of_a_deep_model_ends_and_peaks_as_the_whole_one() -> None:
    workload = llama_workload(num_hidden_layers=BLOCKS)
    knobs = {"micro_batch_size": 2, "precision": "bf16"}
    whole, few = (
        timeline_of(trace(workload, knobs, AMPERE, depths=depths), AMPERE, rates=UNKNOWN)
        for depths in (None, FEW)
    )
    few.check_read()
    assert few.peak_bytes == whole.peak_bytes
    assert max(map(sum, few.moments)) == max(map(sum, whole.moments))
    assert few.moments[-1] == whole.moments[-1]
    assert list(few.at) == sorted(few.at)
    for (name, when), (expected, at) in zip(few.phases, whole.phases, strict=True):
        assert (name, when) == (expected, pytest.approx(at, abs=1e-4))


class CountsItsBlocks(nn.Module):
    """A model whose code knows how many blocks it has."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(BLOCKS):
            x = self.blocks[number](x)
        return x.mean()


def test_a_model_that_counts_its_blocks_is_followed_as_a_whole() -> None:
    workload = Workload(CountsItsBlocks, lambda n: torch.ones(n, 8), effective_batch_size=2)
    traced = trace(workload, {}, CPU, depths=FEW)
    assert traced.shallower is None
    assert resting_of(traced, workload, CPU).blocks == BLOCKS


def test_a_model_of_800_layers_is_followed_no_further_than_one_of_160() -> None:
    fewer, more = (
        trace(llama_workload(num_hidden_layers=layers), {}, CPU) for layers in (160, 800)
    )
    assert len(more.events) == len(fewer.events)
    assert len(more.costs) == len(fewer.costs)
    figures = [peak_of(traced, CPU).nbytes for traced in (fewer, more)]
    weights = [resting_of(traced, llama_workload(), CPU).trained for traced in (fewer, more)]
    assert figures[1] > 4 * figures[0]
    assert weights[1] > 4 * weights[0]
