"""What the gradients of a few samples prove of a loss, and micro-batches that train what the whole batch trains."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autofit.core.hardware import GIB
from autofit.core.workload import Count, Traits, Workload
from autofit.data.counts import loss_count
from autofit.training.build import build
from autofit.training.inspect import Prover, inspect_workload
from autofit.training.step import accumulate
from autofit.training.workload import training_workload, without_weights
from benchmarks.drawn_losses import COUPLING, MLP, SPLITTING, Case, numbers
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


def proven(
    model: nn.Module, batches: list[Any], loss: Callable[..., Any], **options: Any
) -> Traits:
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
        each = functional.cross_entropy(
            model(batch["ids"]).mT, batch["labels"].clamp(min=0), reduction="none"
        )
        return each.mean()

    assert proven(Head(), [tokens()], of_tokens).count == Count("unequal", ("labels",))
    assert proven(Head(), [tokens()], of_samples).count == Count()


def test_data_are_read_on_for_samples_that_tell() -> None:
    """In the largest batch every sample is whole, and the mask of another batch tells."""

    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        each = functional.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        return (each * batch["kept"]).sum() / batch["kept"].sum()

    whole = {"ids": tokens()["ids"], "kept": torch.ones(8, 16)}
    part = {
        "ids": tokens()["ids"],
        "kept": torch.rand(8, 16, generator=torch.Generator().manual_seed(1)).round(),
    }
    for batches in ([whole, part], [part, whole]):
        assert proven(Head(), batches, masked).count == Count("unequal", ("kept",), 0)


def test_one_autocast_inside_a_loss_takes_no_digits_from_the_proof() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return of_tokens(model, batch)

    assert proven(Head(), [tokens()], loss).count == Count("unequal", ("labels",))


def test_a_loss_may_insist_on_single_precision() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(
            model(batch["ids"]).float().flatten(0, 1), batch["labels"].flatten()
        )

    assert proven(Head(), [tokens()], loss).count == Count("unequal", ("labels",))


def test_checkpointing_of_the_older_kind_reaches_a_weight_several_times() -> None:
    """It runs a backward pass inside another one, which gradients of chosen inputs refuse."""

    class Checkpointed(Head):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            return sum(
                checkpoint(self.head, each, use_reentrant=True) for each in (hidden, 2 * hidden)
            )

    assert proven(Checkpointed(), [tokens()], of_tokens).count == Count("unequal", ("labels",))


def test_samples_that_are_all_alike_are_made_to_differ() -> None:
    alike = {
        "ids": torch.zeros(8, 16, dtype=torch.long),
        "labels": torch.zeros(8, 16, dtype=torch.long),
    }
    assert proven(Head(), [alike], of_tokens).splits
    workload = tiny.mlp_workload()
    zeros = Workload(
        lambda: tiny.MLP(), lambda n: (torch.zeros(n, 48), torch.zeros(n).long()), tiny.classify, 4
    )
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


def each_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def largest_of_eight(model: nn.Module, batch: Any) -> torch.Tensor:
    """Takes all of a few samples."""
    each = each_of(model, batch)
    return each.sort(descending=True).values[:8].mean()


def at_least_ten(model: nn.Module, batch: Any) -> torch.Tensor:
    """A sum of few samples, a mean of many."""
    each = each_of(model, batch)
    return each.sum() / max(10, len(each))


def only_of_many(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch["x"])
    loss = functional.cross_entropy(outputs, batch["y"])
    return loss + (outputs @ outputs.T).pow(2).mean() if len(outputs) >= 16 else loss


def hard_ones(model: nn.Module, batch: Any) -> torch.Tensor:
    """With random weights all samples are hard."""
    each = each_of(model, batch)
    hard = each[each > 0.7]
    return hard.mean() if len(hard) else each.mean()


def sure_ones(model: nn.Module, batch: Any) -> torch.Tensor:
    """FixMatch: with random weights no sample is sure."""
    with torch.no_grad():
        chances, likeliest = model(batch["x"]).softmax(-1).max(-1)
    is_sure = (chances > 0.95).to(chances.dtype)
    each = functional.cross_entropy(model(batch["target"]), likeliest, reduction="none")
    return each_of(model, batch).mean() + (each * is_sure).sum() / is_sure.sum().clamp(min=1)


def wrong_ones(model: nn.Module, batch: Any) -> torch.Tensor:
    """With random weights one class may be the likeliest of all samples."""
    outputs = model(batch["x"])
    is_wrong = outputs.argmax(-1) != batch["y"]
    each = functional.cross_entropy(outputs, batch["y"], reduction="none")
    return (each * is_wrong).sum() / is_wrong.sum().clamp(min=1)


def flooded(model: nn.Module, batch: Any) -> torch.Tensor:
    return (each_of(model, batch).mean() - 0.1).abs() + 0.1


def larger_term(model: nn.Module, batch: Any) -> torch.Tensor:
    return max(each_of(model, batch).mean(), 0.1 * model(batch["x"]).pow(2).mean())


def rarely_weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    """A class that no sample has weighs more."""
    weights = torch.ones(10, dtype=batch["x"].dtype)
    weights[9] = 10
    return functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights)


def rarely_weighted_by_hand(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = torch.ones(10, dtype=batch["x"].dtype)
    weights[9] = 10
    of_samples = weights[batch["y"]]
    return (each_of(model, batch) * of_samples).sum() / of_samples.sum()


def rarely_flipped(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"].flip(1) if random.random() < 0.01 else batch["x"]
    return functional.cross_entropy(model(x), batch["y"])


def rarely_halved(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"] * (0.5 if np.random.rand() < 0.01 else 1.0)
    return functional.cross_entropy(model(x), batch["y"])


CALLS = {"number": 0}


def later_another(model: nn.Module, batch: Any) -> torch.Tensor:
    CALLS["number"] += 1
    outputs = model(batch["x"])
    loss = functional.cross_entropy(outputs, batch["y"])
    return loss + outputs.pow(2).mean() if CALLS["number"] > 1000 else loss


class Counting(MLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs = super().forward(x)
        return 2 * outputs if self.calls > 1000 else outputs


def of_vectors(seed: int = 0, samples: int = 32) -> dict[str, Any]:
    return numbers(samples, classes=9)(seed)


HIDDEN = (
    largest_of_eight,
    at_least_ten,
    only_of_many,
    hard_ones,
    sure_ones,
    wrong_ones,
    flooded,
    larger_term,
)
RARE = (rarely_weighted, rarely_weighted_by_hand, rarely_flipped, rarely_halved, later_another)


@pytest.mark.parametrize("loss", [*HIDDEN, *RARE], ids=lambda loss: loss.__name__)
def test_what_few_samples_and_random_weights_do_not_show_is_found(loss: Callable[..., Any]) -> None:
    traits = proven(MLP(), [of_vectors(), of_vectors(1)], loss)
    assert not traits.splits, traits.count


def test_a_model_that_counts_its_calls_is_not_split() -> None:
    traits = proven(Counting(), [of_vectors()], lambda model, batch: each_of(model, batch).mean())
    assert not traits.splits
    assert "what earlier calls left in calls" in traits.notes[-1]


def several_terms(model: nn.Module, batch: Any) -> torch.Tensor:
    """Labels that are left out would give it two counts, but the data have none."""
    return each_of(model, batch).mean() + functional.mse_loss(
        model(batch["x"])[:, 0], batch["target"][:, 0]
    )


def focal(model: nn.Module, batch: Any) -> torch.Tensor:
    each = each_of(model, batch)
    weights = torch.linspace(1, 2, 10, dtype=each.dtype)[batch["y"]]
    return (weights * (1 - (-each).exp()) ** 2 * each).mean()


def with_checks(model: nn.Module, batch: Any) -> torch.Tensor:
    chances = model(batch["x"]).softmax(-1).clamp(1e-7, 1 - 1e-7)
    if (chances < 0).any():
        raise ValueError("a chance below 0")
    return functional.nll_loss(chances.log(), batch["y"])


def own_huber(model: nn.Module, batch: Any) -> torch.Tensor:
    distance = (model(batch["x"])[:, :9] - batch["target"][:, :9]).abs()
    return torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()


def triplets(model: nn.Module, batch: Any) -> torch.Tensor:
    one, other = model(batch["x"]), model(batch["target"])
    return functional.triplet_margin_loss(one, one * 1.1, other, margin=0.1)


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    outputs = model(x)
    (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return functional.cross_entropy(outputs, batch["y"]) + (slopes.norm(dim=1) - 1).pow(2).mean()


@pytest.mark.parametrize(
    "loss",
    [several_terms, focal, with_checks, own_huber, triplets, penalised],
    ids=lambda loss: loss.__name__,
)
def test_what_only_looks_like_coupling_is_split(loss: Callable[..., Any]) -> None:
    traits = proven(MLP(), [of_vectors(), of_vectors(1)], loss)
    assert traits.splits, traits.notes


def test_a_count_that_lengths_give() -> None:
    batch = {**tokens(), "lengths": torch.tensor([16, 3, 9, 5, 1, 16, 7, 2])}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes = model(batch["ids"]).pow(2).mean(-1)
        is_token = torch.arange(16) < batch["lengths"].unsqueeze(1)
        return (sizes * is_token).sum() / is_token.sum()

    assert proven(Head(), [batch], loss).count == Count("total", ("lengths",))


def test_complex_weights_are_compared_as_they_are() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(torch.randn(7, dtype=torch.complex64))
            self.head = nn.Linear(12, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.gains, n=12))

    def by_batch(model: nn.Module, batch: Any) -> torch.Tensor:
        return each_of(model, batch).mean() + len(batch["x"]) * (1j * model.gains).real.pow(2).sum()

    assert proven(
        Filter(), [of_vectors()], lambda model, batch: each_of(model, batch).mean()
    ).splits
    assert not proven(Filter(), [of_vectors()], by_batch).splits


HISTORY: list[float] = []


def test_a_proof_leaves_nothing_behind_in_its_users_loss() -> None:
    def logged(model: nn.Module, batch: Any) -> torch.Tensor:
        CALLS["number"] += 1
        # warns of a single sample
        loss = each_of(model, batch).mean() + 0 * model(batch["x"]).std(0).mean()
        HISTORY.append(loss.item())
        return loss

    CALLS["number"] = 7
    HISTORY[:] = [1.0]
    model = MLP()
    workload = training_workload(model, [of_vectors()], logged)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Prover.of(workload, model, tiny.CPU).traits()
    assert CALLS["number"] == 7
    assert HISTORY == [1.0]
    assert all(weight.grad is None for weight in model.parameters())
