"""The table of words covers every built-in knob, and its order of fidelity names knobs that exist."""

import itertools

import pytest

from autofit.core.errors import InputError
from autofit.core.knobs import FIDELITY_ORDER, KNOBS, SETTABLE, Knob, check_knobs, is_off
from autofit.techniques import all_techniques
from tests import tiny


def test_every_technique_has_a_record_and_no_record_is_left_over() -> None:
    assert {each.name for each in all_techniques()} == KNOBS.keys()
    assert all(technique.record is KNOBS[technique.name] for technique in all_techniques())
    assert {name for name, knob in KNOBS.items() if knob.name != name} == set()


def test_what_records_say_of_other_knobs_names_knobs_that_exist() -> None:
    assert FIDELITY_ORDER == ("quantization", "precision", "optimizer", "lora_rank", "lora_targets")
    for knob in KNOBS.values():
        assert {knob.part_of, knob.beside} <= {"", *KNOBS}


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)
def test_a_record_speaks_of_values_that_the_knob_takes(knob: Knob) -> None:
    same = [*knob.same_trace.items(), *knob.same_work.items()]
    said = [*knob.words, *knob.preferred, *itertools.chain(*same)]
    said += [*knob.fidelity, *knob.memory_order, knob.traced_as or knob.off]
    assert all(knob.accepts(value) for value in said)
    assert knob.title or not knob.has_row


def test_every_knob_says_what_it_takes() -> None:
    described = {name: knob.description for name, knob in SETTABLE.items()}
    assert all(described.values())
    assert described["precision"] == "fp32, tf32, bf16, bf16-mixed, fp16-mixed, fp8"
    assert described["optimizer_in_backward"] == "false, true"
    assert described["lora_rank"] == "a whole number from 0 (train all weights) to 1024"


def test_what_follows_from_other_knobs_is_not_set() -> None:
    assert KNOBS.keys() - SETTABLE.keys() == {"gradient_accumulation_steps", "data_parallel_shard"}


def test_a_config_is_checked_knob_by_knob() -> None:
    check_knobs({"precision": "bf16", "lora_rank": 8})
    with pytest.raises(InputError, match="Did you mean 'precision'"):
        check_knobs({"precison": "bf16"})
    with pytest.raises(InputError, match="lora_rank cannot be -1"):
        check_knobs({"lora_rank": -1})


def test_what_a_record_and_its_technique_take_is_the_same() -> None:
    values = (
        None,
        True,
        False,
        0,
        1,
        1.0,
        0.5,
        -1,
        1024,
        1025,
        2**20,
        10**400,
        float("nan"),
        float("inf"),
        "x",
    )
    for technique in all_techniques():
        knob = KNOBS[technique.name]
        for value in (*values, *knob.values):
            assert knob.accepts(value) == technique.accepts(value, tiny.CPU), (knob.name, value)


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
        (
            Knob("rank", 0, takes="a whole number"),
            -1,
            "rank cannot be -1. It takes a whole number.",
        ),
        (
            Knob("rank", 0, takes="a whole number"),
            "x",
            "rank cannot be 'x'. It takes a whole number.",
        ),
        (
            Knob("words", "a", ("apple", "pear")),
            "appel",
            "unknown value for words 'appel'. Did you mean 'apple'?",
        ),
        (Knob("words", "a", ("apple", None)), 3, "words cannot be 3. Choose from: apple, null."),
        (Knob("own", "a"), None, "own cannot be null."),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(
    knob: Knob, value: object, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        knob.check(value)
    assert str(caught.value) == message
