"""The table of words covers every built-in knob, and its order of fidelity names knobs that exist."""

import pytest

from autofit.core.errors import InputError
from autofit.core.knobs import FIDELITY_ORDER, KNOB_WORDS, Knob, is_off
from autofit.setup import Technique
from autofit.techniques import all_techniques

# Shown beside other knobs.
UNNAMED = {"gradient_accumulation_steps", "lora_targets", "lora_alpha", "lora_dropout", "lora_plus"}


def test_every_knob_has_a_row_and_no_row_is_left_over() -> None:
    assert {each.name for each in all_techniques()} - UNNAMED == set(KNOB_WORDS)
    assert set(FIDELITY_ORDER) <= {each.name for each in all_techniques()}


@pytest.mark.parametrize("technique", all_techniques(), ids=lambda each: each.name)
def test_only_values_of_the_knob_have_words(technique: Technique) -> None:
    words = KNOB_WORDS.get(technique.name)
    assert not words or set(words.values) <= set(technique.values)


def test_what_is_off() -> None:
    assert all(is_off(value) for value in (None, False, 0, "none", "standard"))
    assert not any(is_off(value) for value in (True, 1, "fp32", "cpu"))


def test_a_knob_takes_its_values_and_numbers_by_their_types() -> None:
    whole = Knob("rank", 0, numbers=(0, 1025), takes="a whole number")
    assert all(whole.accepts(value) for value in (0, 1, 1024))
    assert not any(whole.accepts(value) for value in (-1, 1025, 8.0, True, "8", None, 10**400))
    share = Knob("share", None, numbers=(0.0, 1.0))
    assert all(share.accepts(value) for value in (None, 0, 0.0, 0.999))
    assert not any(share.accepts(value) for value in (1, -0.1, False, float("nan"), float("inf")))
    words = Knob("words", "a", ("a", "b", False), nullable=True)
    assert all(words.accepts(value) for value in ("a", "b", False, None))
    assert not any(words.accepts(value) for value in ("c", 0, True, []))
    assert words.description == "a, b, false"


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        (Knob("rank", 0, takes="a whole number"), -1, "rank cannot be -1. It takes a whole number."),
        (Knob("rank", 0, takes="a whole number"), "x", "rank cannot be 'x'. It takes a whole number."),
        (Knob("words", "a", ("apple", "pear")), "appel", "unknown value for words 'appel'. Did you mean 'apple'?"),
        (Knob("words", "a", ("apple", None)), 3, "words cannot be 3. Choose from: apple, null."),
        (Knob("own", "a"), None, "own cannot be null."),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(knob: Knob, value: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        knob.check(value)
    assert str(caught.value) == message
