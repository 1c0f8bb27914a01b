"""A model of many like blocks is followed by few of them, and predicted as if it had been whole."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate import skeleton
from autofit.estimate.estimator import estimate_of
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.resting import resting_of
from autofit.estimate.timeline import timeline_of
from autofit.estimate.trace import trace
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import buckets
from tests.estimate.traced import AMPERE
from tests.tiny import CPU, llama_workload

# The least blocks of which few are followed; where more of the first and last ones do something else, of more.
BLOCKS, DEEPER, DEEPEST = 11, 17, 23
TWO = replace(AMPERE, devices=2)
FSDP = {"data_parallel": "fsdp", "precision": "bf16-mixed", "micro_batch_size": 1}
QLORA = {
    "quantization": "nf4",
    "lora_rank": 8,
    "precision": "bf16-mixed",
    "activation_checkpointing": "full",
}
CASES: list[tuple[int, Hardware, dict[str, Any]]] = [
    (BLOCKS, CPU, {}),
    (DEEPER, AMPERE, {"micro_batch_size": 2, "activation_checkpointing": "alternate"}),
    (BLOCKS, AMPERE, {"optimizer_in_backward": True, "optimizer": "adamw-8bit", "loss": "chunked"}),
    (
        BLOCKS,
        AMPERE,
        {"activation_offload": "cpu", "optimizer_offload": "cpu", "micro_batch_size": 2},
    ),
    (
        BLOCKS,
        AMPERE,
        {"micro_batch_size": 2, "optimizer": "adamw-foreach", "precision": "fp16-mixed"},
    ),
    (BLOCKS, AMPERE, QLORA),
    (DEEPEST, TWO, FSDP),
    (BLOCKS, TWO, {**QLORA, "data_parallel": "ddp", "micro_batch_size": 1}),
    (BLOCKS, TWO, {"data_parallel": "ddp", "micro_batch_size": 1}),
    (DEEPEST, replace(AMPERE, devices=4), {**FSDP, "data_parallel_replicate": 2}),
]


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks are followed of models that are not so deep that it would be quicker."""
    monkeypatch.setattr(skeleton, "_WORTH_IT", 1.0)


@pytest.mark.parametrize(("blocks", "hardware", "knobs"), CASES)
def test_few_blocks_tell_the_figures_of_all_to_the_byte(
    blocks: int, hardware: Hardware, knobs: Mapping[str, Any]
) -> None:
    workload = llama_workload(num_hidden_layers=blocks)
    whole = trace(workload, knobs, hardware, whole=True)
    few = trace(workload, knobs, hardware)
    assert whole.shallower is None
    assert few.shallower is not None
    assert len(few.events) < len(whole.events)

    estimates = []
    for traced in (whole, few):
        found = estimate_of(traced, workload, hardware, rates=UNKNOWN, calibration=None)
        estimates.append(asdict(found))
    expected, found = estimates
    # Of DDP's buckets, which end anywhere, few blocks tell how many there are to one in each block.
    closeness = 1e-3 if knobs.get("data_parallel") == "ddp" else 1e-6
    seconds = ("step_seconds", "samples_per_second", "tokens_per_second", "utilisation")
    for name, value in expected.items():
        if name in seconds:
            assert found[name] == pytest.approx(value, rel=closeness)
        else:
            assert found[name] == value, name
    resting = [resting_of(traced, workload, hardware) for traced in (whole, few)]
    assert resting[0] == resting[1]


def test_buckets_of_gradients_hold_weights_of_several_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2_000)
    monkeypatch.setattr(buckets, "LARGEST_BUCKET", 100_000)
    workload = llama_workload(num_hidden_layers=BLOCKS)
    knobs = {"data_parallel": "ddp", "micro_batch_size": 1}

    made = []
    for whole in (True, False):
        traced = trace(workload, knobs, TWO, whole=whole)
        followed = traced.whole or traced
        made.append(
            [
                event.nbytes
                for event in followed.events[: followed.start("state")]
                if event.nbytes and followed.labels.get(event.storage) == "gradients"
            ]
        )
    assert made[0] == made[1]
    assert 2 < len(made[0]) < BLOCKS


@pytest.mark.parametrize(
    ("hardware", "knobs"),
    [(CPU, {}), (AMPERE, {"micro_batch_size": 1, "activation_checkpointing": "full"})],
)
def test_what_blocks_of_a_kind_share_ends_with_the_first_of_them(
    hardware: Hardware, knobs: Mapping[str, Any]
) -> None:
    """Such as a mask, of which layers of full attention among windows have another one."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {
        **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
        **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    }
    config = {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "num_hidden_layers": 24,
        "layer_types": kinds * 8,
        "sliding_window": 8,
        **sizes,
    }
    model = HuggingFaceModel("tiny", "causal-lm", config, {"kind": "directory", "path": "tiny"})
    workload = huggingface_workload(model, sequence_length=16, effective_batch_size=4)

    few = trace(workload, knobs, hardware)
    assert few.shallower is not None
    whole = trace(workload, knobs, hardware, whole=True)
    assert peak_of(few, hardware).nbytes == peak_of(whole, hardware).nbytes


def test_the_timeline_of_a_deep_model_ends_and_peaks_as_the_whole_one() -> None:
    workload = llama_workload(num_hidden_layers=BLOCKS)
    knobs = {"micro_batch_size": 2, "precision": "bf16"}
    whole, few = (
        timeline_of(trace(workload, knobs, AMPERE, whole=whole), AMPERE, rates=UNKNOWN)
        for whole in (True, False)
    )
    few.check_read()
    assert few.peak_bytes == whole.peak_bytes
    assert max(map(sum, few.moments)) == max(map(sum, whole.moments))
    assert few.moments[-1] == whole.moments[-1]
    assert list(few.at) == sorted(few.at)
    for (name, when), (expected, at) in zip(few.phases, whole.phases, strict=True):
        assert (name, when) == (expected, pytest.approx(at, abs=1e-4))


class Row(nn.Module):
    """A row of blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(DEEPER)]
        self.blocks = nn.ModuleList(blocks)


class CountsItsBlocks(Row):
    """A model whose code knows how many blocks it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(DEEPER):
            x = self.blocks[number](x)
        return x.mean()


def test_a_model_that_counts_its_blocks_is_followed_as_a_whole() -> None:
    workload = Workload(CountsItsBlocks, lambda n: torch.ones(n, 8), effective_batch_size=2)
    traced = trace(workload, {}, CPU)
    assert traced.shallower is None
    assert resting_of(traced, workload, CPU).blocks == DEEPER


class RemembersItsBlocks(Row):
    """A model each of whose blocks looks at the results of all before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [x]
        for block in self.blocks:
            results.append(block(torch.stack(results).mean(0)))
        return results[-1].mean()


def test_a_model_whose_blocks_do_ever_more_is_followed_as_a_whole() -> None:
    workload = Workload(RemembersItsBlocks, lambda n: torch.ones(n, 8), effective_batch_size=2)
    assert trace(workload, {}, CPU).shallower is None


class AddsTheBlockBefore(Row):
    """A model each of whose blocks is given the results of the two before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x + before), x
        return x.mean()


def test_blocks_that_reach_farther_than_their_neighbours_are_told_by_a_few_more() -> None:
    workload = Workload(AddsTheBlockBefore, lambda n: torch.ones(n, 8), effective_batch_size=2)
    few = trace(workload, {}, CPU)
    assert few.shallower is not None

    whole = trace(workload, {}, CPU, whole=True)
    assert peak_of(few, CPU).nbytes == peak_of(whole, CPU).nbytes


def test_a_model_of_500_layers_is_followed_no_further_than_one_of_100() -> None:
    fewer, more = (
        trace(llama_workload(num_hidden_layers=layers), {}, CPU) for layers in (100, 500)
    )
    assert len(more.events) == len(fewer.events)
    assert len(more.costs) == len(fewer.costs)
    figures = [peak_of(traced, CPU).nbytes for traced in (fewer, more)]
    weights = [resting_of(traced, llama_workload(), CPU).trained for traced in (fewer, more)]
    assert figures[1] > 4 * figures[0]
    assert weights[1] > 4 * weights[0]
