"""Workload and Hyperparameters: a wrong part is named when it is given, not when it is first used."""

import dataclasses
import re
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.core.workload import SCHEDULES, Hyperparameters, Workload
from tests import tiny

GOOD = {"model": tiny.MLP, "batch": lambda n: n}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # a module can be called, so only calling it shows that it makes no model
        ({"model": tiny.MLP()}, None),
        (
            {"model": "llama"},
            "Workload.model must be a function, not str. Write model=lambda ...: ...",
        ),
        (
            {"batch": [1]},
            "Workload.batch must be a function, not list. Write batch=lambda ...: ...",
        ),
        (
            {"effective_batch_size": 0},
            "the effective batch size must be a positive whole number, not 0.",
        ),
        (
            {"effective_batch_size": 2.0},
            "the effective batch size must be a positive whole number, not 2.0.",
        ),
        (
            {"effective_batch_size": "4"},
            "the effective batch size must be a positive whole number, not '4'.",
        ),
        ({"unit": "words"}, "unit must be 'samples' or 'tokens', not 'words'."),
        (
            {"unit": "tokens"},
            "unit='tokens' needs sequence_length. Give the number of tokens of one sample.",
        ),
        ({"task": "chess"}, "task must be one of causal-lm, speech-seq2seq, seq2seq, "),
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum', not 'max'."),
    ],
)
def test_wrong_parts_of_a_workload(given: dict, message: str | None) -> None:
    if message is None:
        Workload(**{**GOOD, **given})
        return
    with pytest.raises(InputError) as caught:
        Workload(**{**GOOD, **given})
    assert str(caught.value).startswith(message)


def test_the_summary_is_what_result_yaml_says() -> None:
    summary = Workload(
        **GOOD, task="causal-lm", sequence_length=16, effective_batch_size=8
    ).summary()
    assert summary == {"task": "causal-lm", "sequence_length": 16, "effective_batch_size": 8}


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Workload(**GOOD).unit = "tokens"


def test_the_defaults_and_every_schedule() -> None:
    assert Hyperparameters().schedule == "constant"
    for schedule in SCHEDULES:
        assert Hyperparameters(schedule=schedule).schedule == schedule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0}, "the learning rate must be positive, not 0. For example lr=1e-4."),
        ({"lr": -1e-3}, "the learning rate must be positive, not -0.001."),
        ({"lr": float("nan")}, "the learning rate must be positive, not nan."),
        ({"lr": float("inf")}, "the learning rate must be positive, not inf."),
        ({"lr": "1e-4"}, "the learning rate must be positive, not '1e-4'."),
        ({"schedule": "step"}, "schedule must be one of constant, cosine, linear, not 'step'."),
        ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0, not -0.1."),
        ({"weight_decay": float("nan")}, "weight_decay must be a number of at least 0, not nan."),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, not -1."),
        ({"warmup_steps": None}, "warmup_steps must be a whole number of at least 0, not None."),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number of at least 0, not 1.5."),
        ({"warmup_steps": True}, "warmup_steps must be a whole number of at least 0, not True."),
        ({"lr": "x"}, "the learning rate must be positive, not 'x'."),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive, not 0. Leave it out for none."),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be positive, not nan."),
    ],
)
def test_wrong_hyperparameters(given: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Hyperparameters(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": 3}, "Workload.loss must be a function, not int."),
        ({"count": "x"}, "Workload.count must be a function, not str."),
        ({"effective_batch_size": True}, "must be a positive whole number, not True."),
        ({"effective_batch_size": 10**400}, "must be at most 1,048,576, not 10"),
    ],
)
def test_wrong_parts_are_found_when_they_are_given(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Workload(model=dict, batch=list, **wrong)
