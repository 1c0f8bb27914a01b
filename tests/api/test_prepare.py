"""`prepare`: the step of `fit` in a loop of one's own, on one device and on two."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.core.errors import InputError
from tests import tiny
from tests.api.fitting import assert_same, batches, fitted, mlp, weights
from tests.ranks import on_ranks
from tests.warm import import_there

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_LOOPS = ("own_loop", "with_lightning", "with_accelerate")
SPLIT = {"micro_batch_size": 2, "activation_checkpointing": "full"}


def prepared(model: torch.nn.Module, config: Any = None, **options: Any) -> autofit.TrainingStep:
    given = {"loss": tiny.classify, "lr": 1e-2, "device": "cpu", **options}
    return autofit.prepare(model, SPLIT if config is None else config, **given)


@pytest.mark.parametrize(
    "config",
    [SPLIT, {"lora_rank": 2}, {"precision": "bf16-mixed"}, {"optimizer_in_backward": True}],
    ids=str,
)
def test_a_loop_of_ones_own_learns_what_fit_learns(config: dict[str, Any]) -> None:
    clipping = {} if "optimizer_in_backward" in config else {"max_grad_norm": 0.5}
    trained = fitted(config=config, **clipping)

    model = mlp()
    with prepared(model, config, **clipping) as step:
        losses = [step(batch) for batch in batches()]
        assert step.report is not None
        assert step.report.gradient_norm == trained.history[-1].gradient_norm

    assert losses == [report.loss for report in trained.history]
    assert_same(weights(model), weights(trained.model))
    assert not model._forward_pre_hooks


def test_learning_rates_are_the_optimizers_own() -> None:
    config = {"lora_rank": 2, "lora_plus": 16.0}
    with prepared(mlp(), config, loader=batches()) as step:
        assert sorted({group["lr"] for group in step.optimizer.param_groups}) == [1e-2, 16e-2]
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        before = weights(step.model)
        for batch in batches():
            step(batch)
        assert_same(weights(step.model), before)


def test_its_state_goes_on_in_another_process_to_the_bit() -> None:
    model = mlp()
    with prepared(model) as step:
        step(batches()[0])
        state = step.state_dict()
        for batch in batches()[1:]:
            step(batch)

    another = mlp(depth=2)
    with prepared(another, loader=batches()) as step:
        step.load_state_dict(state)
        for batch in batches()[1:]:
            step(batch)
        assert step.report is not None
        assert step.report.step == 3
    assert_same(weights(another), weights(model))


def test_a_state_of_another_config_is_refused() -> None:
    with prepared(mlp(), {"lora_rank": 2}, loader=batches()) as step:
        state = step.state_dict()
    with (
        prepared(mlp(), loader=batches()) as step,
        pytest.raises(InputError, match="of another model or config"),
    ):
        step.load_state_dict(state)


def test_it_evaluates_between_steps_and_goes_on_in_train_mode() -> None:
    with prepared(mlp()) as step:
        step(batches()[0])
        assert step.evaluate(batches()) > 0
        step.model.eval()
        step(batches()[1])
        assert step.model.training


def test_what_cannot_be_asked_is_said() -> None:
    step = prepared(mlp())
    with pytest.raises(InputError, match="the model is built at the first step"):
        _ = step.optimizer
    step.close()
    with pytest.raises(InputError, match="was closed"):
        step(batches()[0])
    made = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(InputError, match="a function that makes one, not a SGD"):
        prepared(mlp(), optimizer=made)
    with pytest.raises(InputError, match=r"for 2 devices.*torchrun --nproc-per-node 2"):
        prepared(mlp(), {"data_parallel": "ddp", "data_parallel_replicate": 2})


def losses_on_a_rank(
    config: dict[str, Any], steps: int, names: tuple[str, ...]
) -> dict[str, tuple[list[float], ...]]:
    """The losses of autofit's own loop and of each example's, by its name."""
    os.environ["MASTER_ADDR"] = "localhost"  # as torchrun sets it
    sys.path.insert(0, str(EXAMPLES))
    losses = {}
    for name in names:
        example = importlib.import_module(name)
        losses[name] = example.main(config, steps)
    return losses


@pytest.mark.parametrize(("way", "names"), [("ddp", OWN_LOOPS), ("fsdp", ("own_loop",))])
def test_the_examples_losses_are_those_of_fit_on_two_devices(
    way: str, names: tuple[str, ...]
) -> None:
    config = {"micro_batch_size": 4, "data_parallel": way}
    import_there(["accelerate", "pytorch_lightning"])  # once, not on each rank
    for of_rank in on_ranks(2, losses_on_a_rank, config, 3, names):
        for mine, theirs in of_rank.values():
            assert len(mine) == 3
            assert theirs == mine
