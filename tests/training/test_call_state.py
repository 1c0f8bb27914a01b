"""What calls leave behind in a loss and its model is seen, made larger, and taken back."""

import functools
from typing import Any

import torch
from torch import nn

from autofit.training.call_state import CallState

SEEN: list[int] = []
TOTAL = 0
SETTINGS = {"calls": 0, "name": "a"}


def of_module(model: Any, batch: Any) -> None:
    global TOTAL
    TOTAL += 1
    SETTINGS["calls"] += 1
    SEEN.append(TOTAL)


class Loss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> None:
        self.calls += 1

    def method(self, model: Any, batch: Any) -> None:
        self.calls += 1


def test_numbers_of_a_module_are_seen_and_taken_back() -> None:
    state = CallState(of_module)
    assert state.moved() == []
    of_module(None, None)
    assert sorted(state.moved()) == ["TOTAL", "calls"]
    state.advance()
    assert TOTAL > 1_000_000
    assert SETTINGS["calls"] > 1_000_000
    state.restore()
    assert (TOTAL, SETTINGS, SEEN) == (0, {"calls": 0, "name": "a"}, [])


def test_attributes_and_variables_around_a_loss() -> None:
    number = 0

    def inner(model: Any, batch: Any) -> None:
        nonlocal number
        number += 1

    own = Loss()
    for loss in (own, own.method, functools.partial(own, batch=None), inner):
        with CallState.preserved(loss) as state:
            loss(None, batch=None)
            assert state.moved() in (["calls"], ["number"])
    assert (own.calls, number) == (0, 0)


def test_numbers_and_buffers_of_a_model() -> None:
    class Model(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("steps", torch.tensor(0))

    model = Model()
    state = CallState(None, model)
    model.calls += 1
    model.steps += 2
    assert state.moved() == ["calls", "steps"]
    state.restore()
    assert (model.calls, int(model.steps)) == (0, 0)


def test_a_variable_that_is_not_set_yet_is_no_number() -> None:
    def outer() -> Any:
        def inner(model: Any, batch: Any) -> Any:
            return later

        state = CallState(inner)
        later = 1
        return state, later

    assert outer()[0].moved() == []
