"""reference: the same loss and gradients, wherever the answers of the model before training are from."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.config import Value
from autofit.core.workload import Workload
from autofit.models.huggingface import huggingface_workload
from autofit.setup import Setup
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import BlockStreamer
from autofit.setup.streamed_models import stream_blocks
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import accumulate, train_step
from tests import tiny
from tests.streaming import resident_bytes, streamed_bytes
from tests.techniques.contract import living

PAIRS = 4
LORA: dict[str, Value] = {"lora_rank": 4}


def beside(value: Value) -> dict[str, Value]:
    """What a value means nothing without."""
    return LORA if value == "adapter-off" else {}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return tiny.preference_workload("dpo", PAIRS)


def batch_of(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """A batch with padding, and with what the model says of it."""
    batch = workload.batch(PAIRS)
    batch["attention_mask"][1, :, -5:] = 0
    batch["labels"][1, :, -5:] = -100
    batch["reference"] = workload.loss.precomputed({"reference": model}, batch)  # type: ignore[union-attr]
    return batch


def trained_twice(workload: Workload, knobs: dict[str, Value]) -> tuple[Setup, list[torch.Tensor]]:
    """A step, after which the model is no longer the reference, and the loss of the next one, whose gradients stay."""
    setup = build(workload, knobs, tiny.CPU, model=living(workload))
    batch = batch_of(workload, living(workload).eval())
    first = train_step(setup, batch)
    return setup, [first, accumulate(setup, batch)]


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_each_value_gives_the_same_losses_and_gradients(
    workload: Workload, adapters: dict[str, Value], micro_batch_size: int
) -> None:
    knobs = {**adapters, "micro_batch_size": micro_batch_size}
    expected, losses = trained_twice(workload, {**knobs, "reference": "resident"})
    gradients = {name: weight.grad.clone() for name, weight in expected.trainable()}
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # ln 2: nothing was learnt yet
    assert losses[1] < losses[0]

    others = ["precomputed", "adapter-off"] if adapters else ["precomputed"]
    for value in others:
        setup, found = trained_twice(workload, {**knobs, "reference": value})
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        for name, weight in setup.trainable():
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-6)


def test_an_offloaded_copy_says_the_same_with_two_blocks_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5}
    model = replace(tiny.llama(**wide), task="dpo")
    workload = huggingface_workload(model, sequence_length=16, effective_batch_size=PAIRS)
    expected, losses = trained_twice(workload, {"reference": "resident"})

    made: list[BlockStreamer] = []

    def note(*args: Any, **options: Any) -> None:
        made.append(stream_blocks(*args, **options))

    technique = technique_named("reference")
    monkeypatch.setattr(f"{type(technique).__module__}.stream_blocks", note)
    monkeypatch.setattr(technique, "refuse", lambda *_: None)
    monkeypatch.setattr(CopyLane, "of", lambda device: CopyLane(None))
    setup, found = trained_twice(workload, {"reference": "offloaded"})

    assert found == losses
    for (name, weight), (_, other) in zip(setup.trainable(), expected.trainable(), strict=True):
        assert torch.equal(weight.grad, other.grad), name
    (streamer,) = made
    assert streamed_bytes(streamer) >= 5 * 4 * (2 * 256 * 256 + 3 * 256 * 512)
    assert resident_bytes(streamer) <= 0.4 * streamed_bytes(streamer)
    assert repeated_blocks(setup.frozen["reference"])[0] is streamer.blocks[0].module


def test_without_adapters_the_model_is_what_it_was_and_modes_come_back(workload: Workload) -> None:
    model = living(workload)
    plain = copy.deepcopy(model).eval()
    setup = build(workload, {**LORA, "reference": "adapter-off"}, tiny.CPU, model=model)
    for _, weight in setup.trainable():
        nn.init.normal_(weight)
    ids = workload.batch(1)["input_ids"][0]

    answer = setup.models()["reference"](input_ids=ids).logits
    torch.testing.assert_close(answer, plain(input_ids=ids).logits)
    assert not answer.requires_grad
    assert setup.model.training
    assert not torch.allclose(setup.model(input_ids=ids).logits, answer, atol=1e-2)


def test_a_copy_is_neither_trained_nor_returned(workload: Workload) -> None:
    setup = build(workload, {"precision": "bf16"}, tiny.CPU)
    copied = setup.frozen["reference"]
    before = [weight.clone() for weight in copied.parameters()]
    assert {weight.dtype for weight in before} == {torch.bfloat16}

    train_step(setup, workload.batch(PAIRS))
    assert all(map(torch.equal, before, copied.parameters()))
    assert not any(weight.requires_grad for weight in copied.parameters())


@pytest.mark.parametrize(
    ("task", "knobs", "reason"),
    [
        ("dpo", {"reference": "adapter-off"}, "all weights are trained"),
        ("dpo", {"reference": "adapter-off", **LORA, "lora_dora": True}, "DoRA"),
        ("dpo", {"reference": "resident", **LORA, "quantization": "nf4"}, "use adapter-off"),
        ("dpo", {"reference": "offloaded"}, "on a CPU, device and host share one memory"),
        ("causal-lm", {"reference": "precomputed"}, "leave reference out"),
    ],
)
def test_it_is_refused_with_a_remedy(task: str, knobs: dict[str, Value], reason: str) -> None:
    workload = tiny.llama_workload() if task == "causal-lm" else tiny.preference_workload(task)
    refusal = refuse(canonicalize(knobs, workload, tiny.CPU), workload, tiny.CPU)
    assert refusal is not None
    assert reason in refusal


def test_where_batches_cannot_hold_answers_they_are_not_asked_for(workload: Workload) -> None:
    bare = replace(workload, precomputes=False)
    technique = technique_named("reference")
    assert set(technique.choices_for(workload, tiny.CPU)) > {"precomputed"}
    assert technique.choices_for(bare, tiny.CPU) == ("resident", "adapter-off")
    assert technique.choices_for(tiny.llama_workload(), tiny.CPU) == (None,)
    refusal = refuse(canonicalize({"reference": "precomputed"}, bare, tiny.CPU), bare, tiny.CPU)
    assert refusal is not None
    assert "the batches do not hold" in refusal
