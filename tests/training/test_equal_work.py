"""What the gradients of a few samples prove of a loss, and micro-batches that train what the whole batch trains."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autofit.core.hardware import GIB
from autofit.core.workload import Count, Traits, Workload
from autofit.data.counts import loss_count
from autofit.training.build import build
from autofit.training.inspect import inspect_workload
from autofit.training.step import accumulate
from autofit.training.workload import training_workload, without_weights
from benchmarks.drawn_losses import COUPLING, SPLITTING, Case
from benchmarks.equal_work import deviation, find
from tests import tiny


def drawn(kind: Callable[..., Case], seed: int = 0) -> Case:
    return kind(random.Random(seed))


@pytest.mark.parametrize("kind", SPLITTING, ids=lambda kind: kind.__name__.strip("_"))
def test_losses_that_split_are_split_by_what_they_average_over(kind: Callable[..., Case]) -> None:
    case = drawn(kind)
    found = find(case, tiny.CPU)
    assert found.is_named, found.traits.notes
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        assert deviation(case, found.traits, tiny.CPU, dtype, 1) <= bound


@pytest.mark.parametrize("kind", COUPLING, ids=lambda kind: drawn(kind).name)
def test_losses_that_couple_samples_are_not_split(kind: Callable[..., Case]) -> None:
    traits = find(drawn(kind), tiny.CPU).traits
    assert not traits.splits or traits.batch_norm


def test_batch_norm_is_said_not_to_split() -> None:
    assert look(tiny.conv_workload()).batch_norm


def look(workload: Workload) -> Traits:
    return inspect_workload(workload, tiny.CPU, GIB)


def proven(model: nn.Module, batches: list[Any], loss: Callable[..., Any], **options: Any) -> Traits:
    return look(without_weights(training_workload(model, batches, loss, **options), model))


def tokens(samples: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 48, (samples, length), generator=generator)
    return {"ids": ids, "labels": ids.clone()}


def of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


class Head(nn.Module):
    """Predicts each token from itself; its head begins with zeros, so that every sample's loss is log(48)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.head = nn.Linear(16, 48)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_samples_with_all_their_labels_are_told_from_labels() -> None:
    """Nothing of the data tells a mean over samples from one over labels: labels are left out to see."""

    def of_samples(model: nn.Module, batch: Any) -> torch.Tensor:
        each = functional.cross_entropy(model(batch["ids"]).mT, batch["labels"].clamp(min=0), reduction="none")
        return each.mean()

    assert proven(Head(), [tokens()], of_tokens).count == Count("unequal", ("labels",))
    assert proven(Head(), [tokens()], of_samples).count == Count()


def test_data_are_read_on_for_samples_that_tell() -> None:
    """In the largest batch every sample is whole, and the mask of another batch tells."""

    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        each = functional.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        return (each * batch["kept"]).sum() / batch["kept"].sum()

    whole = {"ids": tokens()["ids"], "kept": torch.ones(8, 16)}
    part = {"ids": tokens()["ids"], "kept": torch.rand(8, 16, generator=torch.Generator().manual_seed(1)).round()}
    for batches in ([whole, part], [part, whole]):
        assert proven(Head(), batches, masked).count == Count("unequal", ("kept",), 0)


def test_one_autocast_inside_a_loss_takes_no_digits_from_the_proof() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return of_tokens(model, batch)

    assert proven(Head(), [tokens()], loss).count == Count("unequal", ("labels",))


def test_a_loss_may_insist_on_single_precision() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch["ids"]).float().flatten(0, 1), batch["labels"].flatten())

    assert proven(Head(), [tokens()], loss).count == Count("unequal", ("labels",))


def test_checkpointing_of_the_older_kind_reaches_a_weight_several_times() -> None:
    """It runs a backward pass inside another one, which gradients of chosen inputs refuse."""

    class Checkpointed(Head):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            return sum(checkpoint(self.head, each, use_reentrant=True) for each in (hidden, 2 * hidden))

    assert proven(Checkpointed(), [tokens()], of_tokens).count == Count("unequal", ("labels",))


def test_samples_that_are_all_alike_are_made_to_differ() -> None:
    alike = {"ids": torch.zeros(8, 16, dtype=torch.long), "labels": torch.zeros(8, 16, dtype=torch.long)}
    assert proven(Head(), [alike], of_tokens).splits
    workload = tiny.mlp_workload()
    zeros = Workload(lambda: tiny.MLP(), lambda n: (torch.zeros(n, 48), torch.zeros(n).long()), tiny.classify, 4)
    assert look(zeros).splits == look(workload).splits


def test_a_given_count_is_held_against_gradients() -> None:
    def valid(batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    assert proven(Head(), [tokens()], of_tokens, count=valid).splits
    wrong = proven(Head(), [tokens()], of_tokens, count=lambda batch: len(batch["ids"]))
    assert not wrong.splits
    assert "it is not a mean over count=" in wrong.notes[-1]


def test_a_sum_and_its_count_that_nothing_in_the_batch_counts() -> None:
    def weighted(model: nn.Module, batch: Any) -> Any:
        weights = torch.linspace(0.5, 2, 48, dtype=model.head.weight.dtype)
        total = functional.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), weights, reduction="sum"
        )
        labels = batch["labels"].flatten()
        return total, float(weights[labels[labels >= 0]].sum())

    assert not proven(Head(), [tokens()], weighted).splits


def test_what_a_proof_finds_weighs_the_slices_of_a_step() -> None:
    """Padded samples of unequal length and a head of zeros: micro-batches have the loss of the whole batch."""
    batch = tokens()
    for sample, length in enumerate((16, 3, 3, 2, 9, 16, 1, 4)):
        batch["labels"][sample, length:] = -100
    workload = without_weights(training_workload(Head(), [batch], of_tokens), Head())
    traits = look(workload)
    found = Workload(**{**vars(workload), "traits": traits})
    assert loss_count(found, batch) == 16 + 3 + 3 + 2 + 9 + 16 + 1 + 4

    losses = []
    for micro in (8, 2, 1):
        setup = build(found, {"micro_batch_size": micro}, tiny.CPU)
        losses.append(float(accumulate(setup, batch)))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
