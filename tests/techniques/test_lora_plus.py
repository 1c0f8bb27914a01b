"""lora_plus: the learning rate of second matrices, in the loop, in the backward and from a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.config import Value
from autofit.core.workload import Hyperparameters
from autofit.techniques import canonicalize, refuse
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.loop import train
from tests import tiny
from tests.techniques.contract import Effect

NUMBERS = (16.0,)


def beside(value: Value) -> dict[str, Value]:
    return {"lora_rank": 4}


def rates(setup: Any) -> dict[bool, set[float]]:
    """Learning rates of first (False) and second matrices."""
    names = {parameter: name for name, parameter in setup.trainable()}
    found: dict[bool, set[float]] = {False: set(), True: set()}
    for group in setup.optimizer.param_groups:
        for parameter in group["params"]:
            found["lora_B" in names[parameter]].add(group["lr"])
    return found


def shows(effect: Effect) -> None:
    (slow,), (fast,) = rates(effect.setup).values()
    assert fast == pytest.approx(effect.value * slow)
    assert len({*rates(effect.off)[False], *rates(effect.off)[True]}) == 1


@pytest.mark.parametrize(
    "knobs", [{}, {"optimizer": "adamw-8bit"}, {"optimizer_in_backward": True}]
)
def test_the_loops_schedule_keeps_the_ratio(knobs: dict[str, Value], tmp_path: Path) -> None:
    workload, chosen = tiny.llama_workload(), Hyperparameters(lr=1e-3, warmup_steps=9)
    config = {"lora_rank": 4, "lora_plus": 16.0, **knobs}
    setup = build(workload, config, tiny.CPU, hyperparameters=chosen)
    before = {name: each.detach().clone() for name, each in setup.trainable()}
    train(setup, [workload.batch(4)] * 2, steps=1)
    (slow,), (fast,) = rates(setup).values()
    assert (slow, fast) == (pytest.approx(1e-4), pytest.approx(16e-4))
    moved = {
        name: float((each.detach() - before[name]).abs().max()) for name, each in setup.trainable()
    }
    assert {round(each * 1e4) for name, each in moved.items() if "lora_B" in name} == {16}
    assert {round(each * 1e4) for name, each in moved.items() if "lora_A" in name} == {1}
    checkpoint.save(setup, tmp_path, 1)
    again = build(workload, config, tiny.CPU, hyperparameters=chosen)
    checkpoint.load(again, tmp_path)
    train(again, [workload.batch(4)] * 3, first_step=1, steps=2)
    (slow,), (fast,) = rates(again).values()
    assert fast == pytest.approx(16 * slow)
    assert slow > 1e-4


def test_it_means_nothing_without_a_rank_and_1_is_none() -> None:
    workload = tiny.llama_workload()
    assert canonicalize({"lora_plus": 16.0}, workload, tiny.CPU)["lora_plus"] is None
    assert canonicalize({"lora_plus": 1.0, "lora_rank": 4}, workload, tiny.CPU)["lora_plus"] is None


def test_an_optimizer_of_ones_own_has_its_own_rates() -> None:
    workload = replace(tiny.llama_workload(), optimizer=torch.optim.SGD)
    config = canonicalize({"lora_plus": 16.0, "lora_rank": 4}, workload, tiny.CPU)
    assert str(refuse(config, workload, tiny.CPU)).endswith("leave out lora_plus.")
