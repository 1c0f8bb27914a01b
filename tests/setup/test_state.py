"""Setup: contexts are entered in order, and closing takes everything back in reverse, once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from autofit.core.config import Config
from autofit.core.workload import Hyperparameters
from autofit.setup import Setup
from tests import tiny


@pytest.fixture
def setup() -> Setup:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "norm": nn.LayerNorm(3)}
    )
    model["head"].weight = model["embed"].weight
    return Setup(
        workload=tiny.mlp_workload(),
        config=Config(),
        hardware=tiny.CPU,
        device=torch.device("cpu"),
        model=model,
        hyperparameters=Hyperparameters(),
    )


def test_tied_weights_are_trained_once_and_frozen_ones_not(setup: Setup) -> None:
    assert [name for name, _ in setup.trainable()] == ["embed.weight", "norm.weight", "norm.bias"]
    setup.model["norm"].weight.requires_grad_(False)
    assert [name for name, _ in setup.trainable()] == ["embed.weight", "norm.bias"]


def test_close_takes_back_in_reverse_order_and_only_once(setup: Setup) -> None:
    undone: list[int] = []
    for number in range(3):
        setup.on_close(lambda number=number: undone.append(number))
    setup.close()
    setup.close()
    assert undone == [2, 1, 0]


def test_contexts_are_entered_in_order_each_time_and_left_also_after_an_error(setup: Setup) -> None:
    events: list[str] = []

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        events.append(f"in {name}")
        try:
            yield
        finally:
            events.append(f"out {name}")

    setup.forward_contexts += [lambda: noting("a"), lambda: noting("b")]
    setup.step_contexts.append(lambda: noting("step"))
    for _ in range(2):
        events.clear()
        with setup.step_context(), setup.forward_context():
            events.append("work")
        assert events == ["in step", "in a", "in b", "work", "out b", "out a", "out step"]
    with pytest.raises(ZeroDivisionError), setup.forward_context():
        1 / 0  # noqa: B018
    assert events[-1] == "out a"
    events.clear()


def test_a_context_that_fails_to_open_closes_the_ones_before(setup: Setup) -> None:
    def failing() -> torch.autocast:
        raise ValueError("no")

    setup.forward_contexts += [lambda: torch.autocast("cpu", dtype=torch.bfloat16), failing]
    with pytest.raises(ValueError, match="no"):
        setup.forward_context()
    assert not torch.is_autocast_enabled("cpu")
