"""The losses of sentence embeddings and rerankers, whole and in micro-batches, are those of
sentence-transformers."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.workload import Workload
from autofit.models.huggingface import huggingface_workload
from autofit.models.losses import Rerank
from autofit.training.build import build
from autofit.training.step import accumulate
from tests import tiny

pytest.importorskip("sentence_transformers")

PAIRS = 8


@pytest.fixture(scope="module")
def workload() -> Workload:
    return huggingface_workload(tiny.bert(), sequence_length=12, effective_batch_size=PAIRS)


@pytest.fixture
def batch(workload: Workload) -> dict[str, torch.Tensor]:
    made = dict(workload.batch(PAIRS))
    mask = torch.ones_like(made["input_ids"])
    for row in range(PAIRS):
        mask[row, row % 2, 12 - row :] = 0
    return {**made, "attention_mask": mask}


def living(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model().eval()


def theirs(
    name: str, workload: Workload, batch: dict[str, torch.Tensor], **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    import sentence_transformers.sentence_transformer.losses as of_them

    from benchmarks.training.cached_loss import Encoder

    encoder = Encoder(living(workload))
    features = [
        {key: tensor[:, text] for key, tensor in batch.items() if key != "token_type_ids"}
        for text in range(2)
    ]
    loss = getattr(of_them, name)(encoder, scale=20.0, **options)(features, labels=None)
    loss.backward()
    return float(loss.detach()), gradients(encoder.model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: weight.grad for name, weight in named if weight.grad is not None}


@pytest.mark.parametrize("size", [PAIRS, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MultipleNegativesRankingLoss", {}),
        ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}),
    ],
)
def test_multiple_negatives(
    workload: Workload,
    batch: dict[str, torch.Tensor],
    name: str,
    options: dict[str, Any],
    size: int,
) -> None:
    value, expected = theirs(name, workload, batch, **options)
    model = living(workload)
    setup = build(workload, {"micro_batch_size": size}, tiny.CPU, model=model)
    found = float(accumulate(setup, copy.copy(batch)))
    assert found == pytest.approx(value, rel=1e-5)
    check_same(gradients(model), expected)


def check_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Gradients agree within 1e-5 of their norm."""
    assert ours.keys() == expected.keys()
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5
    apart = sum(float((ours[key] - expected[key]).square().sum()) for key in expected) ** 0.5
    assert apart < 1e-5 * norm


@pytest.mark.parametrize("positive_weight", [1.0, 3.0])
@pytest.mark.parametrize("size", [PAIRS, 2])
def test_binary_cross_entropy_of_rerankers(
    positive_weight: float, size: int, tmp_path: Path
) -> None:
    from sentence_transformers.cross_encoder import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    queries = [f"w{number} w{number + 1}" for number in range(PAIRS)]
    passages = ["w3 w4 w5" if number % 2 else f"w{number}" for number in range(PAIRS)]
    labels = torch.linspace(0, 1, PAIRS)

    path = tiny.saved_encoder(tmp_path, "AutoModelForSequenceClassification")
    theirs = CrossEncoder(str(path), device="cpu").eval()
    weight = None if positive_weight == 1 else torch.tensor(positive_weight)
    expected = BinaryCrossEntropyLoss(theirs, pos_weight=weight)([queries, passages], labels)
    expected.backward()

    workload = huggingface_workload(
        replace(tiny.bert(), task="rerank"), sequence_length=12, effective_batch_size=PAIRS
    )
    model = CrossEncoder(str(path), device="cpu").model.eval()
    batch = {**theirs.preprocess(list(zip(queries, passages, strict=True))), "labels": labels}
    batch = {name: each for name, each in batch.items() if torch.is_tensor(each)}
    loss = Rerank(positive_weight=positive_weight)
    setup = build(replace(workload, loss=loss), {"micro_batch_size": size}, tiny.CPU, model=model)
    found = float(accumulate(setup, batch))

    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    check_same(gradients(model), gradients(theirs.model))
