"""Strategies of the step: one device does nothing for ranks, and ranks with unequal parts train as one device does."""

from typing import Any

import pytest
import torch

from autofit.distributed import Ranks
from autofit.training.build import build
from autofit.training.local_batch import local_batch
from autofit.training.step import accumulate, loss_value, train_step
from autofit.training.strategies import strategy_of
from autofit.training.strategy import DataParallel, SingleDevice
from tests import tiny
from tests.ranks import on_ranks
from tests.tolerances import LOSS_OF_16_BITS
from tests.training.test_several_ranks import BATCH, DDP, FSDP, losses


@pytest.mark.parametrize(
    "knobs", [{"micro_batch_size": 2}, {"optimizer_in_backward": True}], ids=str
)
def test_one_device_neither_asks_nor_reduces(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    setup = build(tiny.mlp_workload(4), knobs, tiny.CPU)
    assert type(strategy_of(setup)) is SingleDevice

    def called(*_: Any) -> None:
        raise AssertionError("there are no other ranks")

    for name in ("asked", "everywhere", "sum_of"):
        monkeypatch.setattr(Ranks, name, called)
    part = local_batch(setup, setup.workload.batch(4))
    assert train_step(setup, part).isfinite()
    with torch.no_grad():
        assert loss_value(setup, part.batch) > 0


def test_a_loss_that_is_not_finite_is_not_applied_in_the_backward() -> None:
    setup = build(tiny.mlp_workload(4), {"optimizer_in_backward": True}, tiny.CPU)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    inputs, classes = setup.workload.batch(4)
    loss = accumulate(setup, (inputs * torch.inf, classes))
    assert not loss.isfinite()
    assert setup.progress.phase == "backward"
    assert all(
        torch.equal(one, other) for one, other in zip(setup.model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_scaled_losses_of_unequal_parts_are_those_of_one_device(parallel: dict[str, Any]) -> None:
    """Of 12, 5 and 1 samples in micro-batches of 2, with other numbers of labels: one rank has fewer of them."""
    knobs = {"precision": "fp16-mixed", "micro_batch_size": 2}
    sizes = (BATCH, 5, 1)
    (expected,) = on_ranks(1, losses, knobs, 1, sizes)
    for found in on_ranks(2, losses, knobs | parallel, 2, sizes):
        assert found == pytest.approx(expected, abs=LOSS_OF_16_BITS)


def strategy_here(knobs: dict[str, Any]) -> bool:
    setup = build(tiny.llama_workload(), knobs, tiny.CPU.of_several(2))
    return type(strategy_of(setup)) is DataParallel


def test_several_devices_have_another_strategy() -> None:
    assert on_ranks(2, strategy_here, FSDP) == [True, True]
