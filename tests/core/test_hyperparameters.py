"""Hyperparameters: what cannot be learnt with is said at once."""

import pytest

from autofit.core.errors import InputError
from autofit.core.hyperparameters import SCHEDULES, Hyperparameters


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
        ({"warmup_steps": -1}, "warmup_steps must be a number of at least 0, not -1."),
        ({"warmup_steps": None}, "warmup_steps must be a number of at least 0, not None."),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive, not 0. Leave it out for none."),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be positive, not nan."),
    ],
)
def test_what_cannot_be(given: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Hyperparameters(**given)
    assert str(caught.value).startswith(message)
