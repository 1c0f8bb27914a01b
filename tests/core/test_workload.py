"""Workload: a wrong part is named when it is put together, not when it is first used."""

import dataclasses

import pytest

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from tests import tiny

GOOD = {"model": tiny.MLP, "batch": lambda n: n}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": tiny.MLP()}, None),  # a module can be called, so only calling it shows that it makes no model
        ({"model": "llama"}, "Workload.model must be a function, not str. Write model=lambda ...: ..."),
        ({"batch": [1]}, "Workload.batch must be a function, not list. Write batch=lambda ...: ..."),
        ({"effective_batch_size": 0}, "the effective batch size must be a positive whole number, not 0."),
        ({"effective_batch_size": 2.0}, "the effective batch size must be a positive whole number, not 2.0."),
        ({"effective_batch_size": "4"}, "the effective batch size must be a positive whole number, not '4'."),
        ({"unit": "words"}, "unit must be 'samples' or 'tokens', not 'words'."),
        ({"unit": "tokens"}, "unit='tokens' needs sequence_length. Give the number of tokens of one sample."),
        ({"task": "chess"}, "task must be one of causal-lm, masked-lm, "),
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum', not 'max'."),
    ],
)
def test_what_cannot_be(given: dict, message: str | None) -> None:
    if message is None:
        Workload(**{**GOOD, **given})
        return
    with pytest.raises(InputError) as caught:
        Workload(**{**GOOD, **given})
    assert str(caught.value).startswith(message)


def test_the_summary_is_what_result_yaml_says() -> None:
    summary = tiny.llama_workload(8, sequence_length=16).summary()
    assert summary == {"task": "causal-lm", "sequence_length": 16, "effective_batch_size": 8}


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Workload(**GOOD).unit = "tokens"
