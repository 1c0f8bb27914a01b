"""Losses of representations in micro-batches have the loss and gradients of the whole batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autofit import losses
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.models.huggingface import huggingface_workload
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.local_batch import LocalBatch
from autofit.training.step import accumulate, train_step, update
from tests import tiny
from tests.ranks import on_ranks
from tests.tolerances import LOSS

PAIRS = 8


def workload_of(loss: Any = None, *, texts: int = 2, dropout: float = 0.0) -> Workload:
    """Embedding texts by that tiny BERT."""
    model = tiny.bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    made = huggingface_workload(model, sequence_length=12, effective_batch_size=PAIRS)
    if texts > 2:
        pairs = made.batch
        made = dataclasses.replace(made, batch=lambda n: _more_texts(pairs, n, texts))
    return dataclasses.replace(made, loss=loss or losses.Embed())


def _more_texts(pairs: Any, samples: int, texts: int) -> dict[str, torch.Tensor]:
    ids = pairs(samples * texts)["input_ids"]
    return {"input_ids": ids[:, 0].unflatten(0, (samples, texts))}


def batch_of(workload: Workload) -> dict[str, torch.Tensor]:
    """Texts of different lengths."""
    batch = dict(workload.batch(PAIRS))
    mask = torch.ones_like(batch["input_ids"])
    for row in range(PAIRS):
        mask[row, row % 2, 12 - row :] = 0
    return {**batch, "attention_mask": mask}


def gradients(setup: Setup, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    loss = float(accumulate(setup, batch))
    found = {name: weight.grad for name, weight in setup.trainable() if weight.grad is not None}
    return loss, found


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to that of the expected gradients."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    norm = sum(float(gradient.square().sum()) for gradient in expected.values())
    return (apart / norm) ** 0.5


KINDS = {
    "negatives": (losses.Embed(), 2),
    "symmetric": (losses.Embed(kind="symmetric", pooling="first"), 2),
    "hard negatives": (losses.Embed(pooling="last"), 4),
    "triplet": (losses.Embed(kind="triplet"), 3),
    "Matryoshka": (losses.Embed(dimensions=(8, 16, 32)), 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 1])
def test_gradients_are_those_of_the_whole_batch(kind: str, size: int) -> None:
    loss, texts = KINDS[kind]
    workload = workload_of(loss, texts=texts)
    model = living(workload)
    batch = batch_of(workload)
    whole = gradients(build(workload, {}, tiny.CPU, model=model), batch)
    model = living(workload)
    setup = build(workload, {}, tiny.CPU, model=model)
    setup.micro_batch_size = size
    found = gradients(setup, batch)
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert distance(found[1], whole[1]) < 1e-5


def living(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model()


def test_in_double_precision_nothing_but_rounding_is_left() -> None:
    plain = workload_of(DoubleEmbed())
    found = []
    for size in (PAIRS, 2):
        setup = build(plain, {"micro_batch_size": size}, tiny.CPU, model=living(plain))
        setup.model.double()
        found.append(gradients(setup, batch_of(plain)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)  # which is told in fp32
    assert distance(found[1][1], found[0][1]) < 1e-10


@dataclasses.dataclass(frozen=True)
class DoubleEmbed(losses.Embed):
    """In the format of the model."""

    def represent(self, model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"].flatten(0, 1)
        mask = batch["attention_mask"].flatten(0, 1)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden.mean(dim=1).unflatten(0, batch["input_ids"].shape[:2])


def test_dropout_is_the_same_in_both_forwards() -> None:
    """By hand: representations with the draws of each micro-batch, then one backward through all."""
    workload = workload_of(dropout=0.2)
    batch = batch_of(workload)
    setup = build(workload, {"micro_batch_size": 2}, tiny.CPU, model=living(workload))
    loss, found = gradients(setup, batch)

    model = living(workload).train()
    torch.manual_seed(0)
    vectors = []
    for start in range(0, PAIRS, 2):
        part = {name: tensor[start : start + 2] for name, tensor in batch.items()}
        vectors.append(losses.Embed().represent(model, part))
    expected = losses.Embed().of_representations(torch.cat(vectors))
    expected.backward()
    by_hand = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert distance(found, by_hand) < 1e-5


def test_evaluation_compares_all_samples_of_a_batch_whatever_the_micro_batch() -> None:
    workload = workload_of()
    batch = batch_of(workload)
    found = []
    for size in (PAIRS, 2):
        setup = build(workload, {"micro_batch_size": size}, tiny.CPU, model=living(workload))
        found.append(evaluate(setup, [batch]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def trained(world: int, **knobs: Any) -> list[float]:
    workload = workload_of()
    hardware = dataclasses.replace(tiny.CPU, devices=world)
    setup = build(workload, knobs, hardware, hyperparameters=Hyperparameters(lr=1e-3))
    found = []
    for _ in range(3):
        part, counts = own_samples(
            batch_of(workload), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
        )
        found.append(float(accumulate(setup, LocalBatch(part, counts))))
        assert update(setup)
    setup.close()
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_compare_the_samples_of_both(parallel: str) -> None:
    for own in ({}, {"lora_rank": 4}):
        expected = trained(1, **own)
        for size in (4, 2):
            knobs = {**own, "data_parallel": parallel, "micro_batch_size": size}
            for found in on_ranks(2, _on_rank, knobs):
                assert found == pytest.approx(expected, rel=LOSS)


def _on_rank(knobs: dict[str, Any]) -> list[float]:
    return trained(2, **knobs)


def test_under_autocast_it_learns() -> None:
    workload = workload_of()
    setup = build(workload, {"precision": "bf16-mixed", "micro_batch_size": 2}, tiny.CPU)
    first = train_step(setup, batch_of(workload))
    assert train_step(setup, batch_of(workload)) < first


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=PAIRS, max_size=PAIRS),
    size=st.sampled_from([1, 2, 4]),
)
def test_short_texts_are_replayed_in_the_tokens_of_long_ones(lengths: list[int], size: int) -> None:
    workload = workload_of()
    batch = dict(workload.batch(PAIRS))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for row, length in enumerate(lengths):
        batch["attention_mask"][row, :, length:] = 0

    seen = []
    inner = workload.loss

    class Watched:
        def __call__(self, model: Any, micro: Any) -> torch.Tensor:
            raise AssertionError("it is replayed")

        def represent(self, model: Any, micro: Any) -> torch.Tensor:
            seen.append(tuple(micro["input_ids"].shape[::2]))
            return inner.represent(model, micro)  # type: ignore[union-attr]

        def of_representations(self, rows: torch.Tensor) -> torch.Tensor:
            return inner.of_representations(rows)  # type: ignore[union-attr]

    watched = dataclasses.replace(workload, loss=Watched())
    setup = build(watched, {"micro_batch_size": size}, tiny.CPU)
    accumulate(setup, batch)
    setup.close()
    assert sum(samples for samples, _ in seen) == 2 * PAIRS
    assert all(samples * tokens <= size * 12 for samples, tokens in seen)
    fewest = sum(lengths) / (size * 12)
    assert len(seen) / 2 <= 2 * fewest + 1
