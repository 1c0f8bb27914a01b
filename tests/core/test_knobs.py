"""The table of words covers every built-in knob, and its order of fidelity names knobs that exist."""

import pytest

from autofit.core.knobs import FIDELITY_ORDER, KNOB_WORDS, is_off
from autofit.setup import Technique
from autofit.techniques import all_techniques

UNNAMED = {"gradient_accumulation_steps", "lora_targets", "lora_alpha", "lora_dropout"}  # shown beside other knobs


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
