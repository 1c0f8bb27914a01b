"""activation_offload: refused where both sides are one memory; elsewhere the run of a config moves what it saves."""

import dataclasses
import gc
from typing import Any

import pytest
import torch

from autofit.core.workload import Workload
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.saved_tensors import SMALLEST
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.step import accumulate, train_step
from autofit.tuning.target import structure_traits
from tests import tiny

OFFLOAD = {"activation_offload": "cpu"}
CUDA = dataclasses.replace(tiny.CPU, device="cuda", name="a card", capability=(8, 0))
TECHNIQUE = technique_named("activation_offload")
SAMPLES = 8192  # features of 48 floats: 1.5 MiB, and 3 MiB between the matrices of a layer


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it run here, with copies that are done at once."""
    monkeypatch.setattr(TECHNIQUE, "refuse", lambda *_: None)
    monkeypatch.setattr(CopyLane, "of", lambda device: CopyLane(None))


def built(config: dict[str, Any]) -> Setup:
    torch.manual_seed(0)
    return build(tiny.mlp_workload(SAMPLES), config, tiny.CPU, model=tiny.MLP())


def offload_of(setup: Setup) -> Any:
    (hooks,) = setup.forward_contexts
    return hooks.__self__


def test_it_is_searched_only_where_there_are_two_memories() -> None:
    assert TECHNIQUE.choices(tiny.CPU) == ("none",)
    assert TECHNIQUE.choices(CUDA) == ("none", "cpu")
    workload = tiny.mlp_workload()
    assert refuse(canonicalize(OFFLOAD, workload, CUDA), workload, CUDA) is None
    assert "share one memory" in refuse(
        canonicalize(OFFLOAD, workload, tiny.CPU), workload, tiny.CPU
    )


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_size": SAMPLES // 2}, {"activation_checkpointing": "full"}]
)
def test_gradients_are_the_same_and_what_is_large_is_moved(knobs: dict[str, Any]) -> None:
    plain, moved = built(knobs), built(OFFLOAD | knobs)
    batch = plain.workload.batch(SAMPLES)
    assert torch.equal(accumulate(plain, batch), accumulate(moved, batch))
    for (_, one), (_, other) in zip(plain.trainable(), moved.trainable(), strict=True):
        assert torch.equal(one.grad, other.grad)
    features, inside = SAMPLES * 48 * 4, SAMPLES * 96 * 4
    large = {
        "{}": 5 * features
        + 4 * inside,  # what enters each layer and the head; the logits stay below 1 MiB
        # Halves of the features are below it too, but on a CPU a slice of the batch is a view of the whole.
        "micro": 4 * inside + 2 * features,
        "full": 5 * features,
    }
    kind = "{}" if not knobs else "micro" if "micro_batch_size" in knobs else "full"
    assert offload_of(moved).packed_bytes == large[kind]
    assert features // 2 < SMALLEST < features


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("knobs", [{}, {"activation_checkpointing": "full"}])
def test_only_what_the_first_blocks_save_is_moved(knobs: dict[str, Any]) -> None:
    plain, moved = built(knobs), built({"activation_offload": "cpu:2"} | knobs)
    batch = plain.workload.batch(SAMPLES)
    assert torch.equal(accumulate(plain, batch), accumulate(moved, batch))
    for (_, one), (_, other) in zip(plain.trainable(), moved.trainable(), strict=True):
        assert torch.equal(one.grad, other.grad)

    features, inside = SAMPLES * 48 * 4, SAMPLES * 96 * 4
    assert offload_of(moved).packed_bytes == 2 * features + (0 if knobs else 2 * inside)
    blocks = repeated_blocks(moved.model)
    moved.close()
    assert not any(block._forward_pre_hooks for block in blocks)


@pytest.mark.parametrize(
    ("value", "canonical"), [("cpu:0", "none"), ("cpu:2", "cpu:2"), ("cpu:4", "cpu")]
)
def test_one_word_where_all_blocks_are_alike(value: str, canonical: str) -> None:
    workload = tiny.mlp_workload()
    workload = dataclasses.replace(workload, traits=structure_traits(workload, CUDA))
    assert workload.traits.blocks == 4
    config = canonicalize({"activation_offload": value}, workload, CUDA)
    assert config.activation_offload == canonical


def test_a_number_needs_blocks() -> None:
    workload = tiny.mlp_workload()
    traits = dataclasses.replace(structure_traits(workload, CUDA), blocks=0)
    workload = dataclasses.replace(workload, traits=traits)
    config = canonicalize({"activation_offload": "cpu:2"}, workload, CUDA)
    assert "no repeated blocks to count; use cpu" in refuse(config, workload, CUDA)


@pytest.mark.usefixtures("on_cpu")
def test_steps_and_evaluations_take_turns() -> None:
    setup = built(OFFLOAD | {"micro_batch_size": SAMPLES // 2})
    batch = setup.workload.batch(SAMPLES)
    losses = [float(train_step(setup, batch))]
    held = offload_of(setup).pool.held_bytes
    for _ in range(3):
        packed = offload_of(setup).packed_bytes
        evaluate(setup, [batch])
        assert offload_of(setup).packed_bytes == packed
        losses.append(float(train_step(setup, batch)))
    assert losses[-1] < losses[0]
    assert offload_of(setup).pool.held_bytes == held


@pytest.mark.gpu
@pytest.mark.parametrize(
    "knobs", [{}, {"activation_checkpointing": "full"}, {"precision": "bf16-mixed"}]
)
def test_on_a_card_the_peak_falls_by_what_is_packed(knobs: dict[str, Any]) -> None:
    workload = wide_workload()

    def run(config: dict[str, Any]) -> tuple[Setup, int, list[torch.Tensor]]:
        gc.collect()  # a checkpointed block and its forward hold each other
        torch.manual_seed(0)
        setup = build(workload, config, detect("cuda"), model=workload.model())
        batch = workload.batch(32768)
        for _ in range(3):
            setup.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            loss = accumulate(setup, batch)
        peak = torch.cuda.max_memory_allocated()
        return (
            setup,
            peak,
            [loss.cpu(), *(parameter.grad.cpu() for _, parameter in setup.trainable())],
        )

    plain_setup, plain_peak, plain = run(knobs)
    del plain_setup
    setup, peak, moved = run(knobs | OFFLOAD)
    for one, other in zip(plain, moved, strict=True):
        torch.testing.assert_close(one, other)
    offload = next(each.__self__ for each in setup.forward_contexts if hasattr(each, "__self__"))
    window = 2**28
    # Without offloading the peak is where the backward begins; with it, where all gradients are there.
    gradients = sum(parameter.nbytes for _, parameter in setup.trainable())
    assert plain_peak - peak >= offload.packed_bytes / 3 - 3 * window - gradients
    assert offload.packed_bytes / 3 > 8 * window


def wide_workload() -> Workload:
    """32768 rows of 1024 floats, 128 MiB, enter each of 24 layers."""

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, 1024), torch.randint(10, (samples,))

    return dataclasses.replace(
        tiny.mlp_workload(32768), model=lambda: tiny.MLP(width=1024, depth=24), batch=batch
    )
