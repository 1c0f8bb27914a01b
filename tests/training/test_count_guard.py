"""Batches that show for the first time what a loss averages over are tried before they are trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.core.errors import InputError
from autofit.core.workload import Count, Traits, Workload
from autofit.training.build import build
from autofit.training.inspect import Prover
from autofit.training.loop import train
from tests import tiny

TRAITS = Traits(
    parameters=1, blocks=0, linears=1, attention=False, sdpa=False, batch_norm=False, dropout=False
)
LABELS = Count("unequal", ("y",))


def batch(missing: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (4, 6), generator=generator)
    y[0, 1 : 1 + missing] = -100
    return {"x": torch.randn(4, 6, 8, generator=generator), "y": y}


def of_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def of_both(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_labels(model, batch) + model(batch["x"]).pow(2).mean()


def workload(loss: Any, chosen: Count, *rivals: Count) -> Workload:
    traits = replace(TRAITS, count=chosen, rivals=rivals)
    return Workload(lambda: nn.Linear(8, 10), lambda n: batch(), loss, 4, traits=traits)


def trained(made: Workload, *batches: Any) -> tuple[list[float], list[str], Workload]:
    said: list[str] = []
    setup = build(made, {"micro_batch_size": 1, "optimizer": "sgd"}, tiny.CPU)
    prover = Prover.of(made, nn.Linear(8, 10), tiny.CPU)
    reports = train(setup, batches, steps=len(batches), listener=said.append, prover=prover)
    return [report.loss for report in reports], said, setup.workload


def test_the_first_batch_that_tells_decides() -> None:
    losses, said, after = trained(workload(of_labels, Count(), LABELS), batch(), batch(4, 1))
    right, _, _ = trained(workload(of_labels, LABELS), batch(), batch(4, 1))
    assert losses == pytest.approx(right, rel=1e-6)
    assert said == [
        "the loss is a mean over batch['y'] != -100: this batch is the first that shows it."
    ]
    assert after.traits is not None
    assert after.traits.count == LABELS


def test_batches_that_tell_nothing_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prover, "proof", lambda *_: pytest.fail("tried"))
    losses, said, _ = trained(workload(of_labels, Count(), LABELS), batch(), batch(0, 1))
    assert len(losses) == 2
    assert not said


def test_a_loss_that_turns_out_to_have_two_counts_ends_the_training() -> None:
    with pytest.raises(InputError, match="the loss of this batch cannot be split"):
        trained(workload(of_both, Count(), LABELS), batch(), batch(4, 1))
