"""Optimizers over weights that ranks divide: updates, groups, state that is saved and loaded."""

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters
from autofit.data.batch import own_samples
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload
from tests.tolerances import LOSS_OF_8_BITS, LOSS_OF_16_BITS_IN_LARGE_STEPS

WIDE = {"intermediate_size": 512}  # halves of its matrices are still stored in few bits
IN_BACKWARD = {"optimizer": "adamw-8bit", "optimizer_in_backward": True}
COMPILED = ("adamw-4bit", "adamw-fp8", "adamw-sr", "adamw-8bit-sr")
# Blocks begin at the same elements on two ranks, but an element between two numbers of few bits may round either way.
# Of 8 bits that is a tenth of one weight's step, 1e-5 of the loss; of 4 bits, half of it.
CLOSE = {"adamw-8bit": LOSS_OF_8_BITS, "adamw-4bit": 2e-4, "adamw-fp8": 2e-4}
OF_BF16 = ("adamw-master", "adamw-sr", "adamw-8bit-sr", "adamw-fp8")


def built(knobs: Mapping[str, Any], world: int) -> Setup:
    hardware = dataclasses.replace(CPU, devices=world)
    return build(
        llama_workload(**WIDE),
        knobs,
        hardware,
        hyperparameters=Hyperparameters(lr=1e-2, weight_decay=0.3),
    )


def stepped(setup: Setup, number: int) -> float:
    torch.manual_seed(number)
    own, _ = own_samples(setup.workload.batch(4), setup.ranks.dp_rank, setup.ranks.layout.dp_degree)
    loss = float(accumulate(setup, own))
    # which forbids compilation
    watched = StorageTracker() if setup.config["optimizer"] in COMPILED else nullcontext()
    with watched:
        update(setup)
    return loss


def resumed(knobs: Mapping[str, Any], world: int) -> list[float]:
    """Four losses, the last two of a second setup that goes on with what the first one saved."""
    setup, again = built(knobs, world), built(knobs, world)
    assert setup.optimizer and again.optimizer
    losses = [stepped(setup, number) for number in range(2)]
    again.optimizer.load_state_dict(setup.optimizer.state_dict())
    again.model.load_state_dict(setup.model.state_dict())
    assert {group["weight_decay"] for group in again.optimizer.param_groups} == {0.0, 0.3}
    return losses + [stepped(again, number) for number in (2, 3)]


@pytest.mark.parametrize(
    "knobs", [{"optimizer": each} for each in ("adamw-8bit", *COMPILED[:2])] + [IN_BACKWARD]
)
def test_state_of_few_bits_is_of_each_ranks_part_and_goes_on_when_saved(
    knobs: dict[str, Any],
) -> None:
    (expected,) = on_ranks(1, resumed, knobs, 1)
    for losses in on_ranks(2, resumed, knobs | {"data_parallel": "fsdp"}, 2):
        assert losses == pytest.approx(expected, abs=CLOSE[knobs["optimizer"]])


def each_resumed(world: int) -> list[list[float]]:
    parallel = {"data_parallel": "fsdp"} if world > 1 else {}
    return [
        resumed({"precision": "bf16", "optimizer": value} | parallel, world) for value in OF_BF16
    ]


def test_bf16_weights_learn_the_same_on_two_ranks() -> None:
    """Within what bf16 rounds, and by chance."""
    (alone,) = on_ranks(1, each_resumed, 1)
    for found in on_ranks(2, each_resumed, 2):
        for losses, expected in zip(found, alone, strict=True):
            assert losses == pytest.approx(expected, abs=LOSS_OF_16_BITS_IN_LARGE_STEPS)


def refused(knobs: Mapping[str, Any]) -> str:
    setup = built(knobs, 2)
    stepped(setup, 0)
    assert setup.optimizer is not None
    state = copy.deepcopy(setup.optimizer.state_dict())
    for each in state["state"].values():
        moments = each["__bnb_optimizer_quant_state__"]
        moments["state1"] = torch.cat([moments["state1"]] * 2)  # as one device has it
    with pytest.raises(InputError) as error:
        setup.optimizer.load_state_dict(state)
    return str(error.value)


def test_state_of_another_number_of_ranks_is_refused() -> None:
    (message, _) = on_ranks(2, refused, {"optimizer": "adamw-8bit", "data_parallel": "fsdp"})
    assert "is not of this rank's part" in message
