"""Labels of files become class numbers, and those that cannot are told by their place."""

from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.data.labels import labels_from
from autofit.data.options import LabelRule


def numbered(*values: Any, rule: LabelRule | None = None) -> tuple[list[float], dict[str, int]]:
    places = [f"a.csv, line {number}" for number in range(1, len(values) + 1)]
    labels = labels_from(values, places, rule or LabelRule())
    return labels.numbers.tolist(), dict(labels.names)


def test_names_are_numbered_in_alphabetical_order() -> None:
    assert numbered("good", "bad", "good") == ([1, 0, 1], {"bad": 0, "good": 1})
    assert numbered(True, False) == ([1, 0], {"False": 0, "True": 1})


def test_numbers_stay() -> None:
    assert numbered(2, 10, 0, rule=LabelRule(11)) == ([2, 10, 0], {})


def test_the_models_own_names_are_kept_to_when_they_are_those_of_the_data() -> None:
    rule = LabelRule(3, {"cat": 0, "dog": 1, "cow": 2})
    assert numbered("cow", "dog", rule=rule)[0] == [2, 1]
    assert numbered("cow", "emu", rule=rule) == ([0, 1], {"cow": 0, "emu": 1})


def test_a_model_of_one_class_measures() -> None:
    assert numbered(1, 2.5, rule=LabelRule(1)) == ([1.0, 2.5], {})


@pytest.mark.parametrize(
    ("values", "rule", "words"),
    [
        ((0, 3), LabelRule(3), "line 2: label 3, but the model has classes 0 to 2"),
        ((-1,), LabelRule(), "line 1: label -1, but classes count from 0"),
        (("a", "b", "c"), LabelRule(2), "the data has 3 classes, but the model has 2"),
        (("a", 1), LabelRule(), "line 2: label 1 beside 'a', which mixes names and numbers"),
        ((1, "a"), LabelRule(), "line 2: label 'a' beside 1, which mixes"),
        ((2**63,), LabelRule(), "line 1: label 9223372036854775808, but classes count from 0"),
        (
            (10**4200, 1),
            LabelRule(2),
            r"line 1: label 1[0]*\.\.\., but the model has classes 0 to 1",
        ),
        (
            (1, 10**400),
            LabelRule(1),
            "line 2: the model has one class, so a label must be a number, not 10",
        ),
        (
            (float("nan"),),
            LabelRule(1),
            "line 1: the model has one class, so a label must be a number, not nan",
        ),
        (
            ("x" * 10**6, "a"),
            LabelRule(1, {"a": 0}, strict=True),
            "a number, not 'xx.*x\\.\\.\\.[.] Set",
        ),
        ((1.5,), LabelRule(2), "line 1: a label must be a name or a whole number, not float"),
        (([1],), LabelRule(), "line 1: a label must be a name or a whole number, not list"),
        (
            (0.5, "a"),
            LabelRule(1),
            "line 2: the model has one class, so a label must be a number, not 'a'",
        ),
        (
            ("a", "c"),
            LabelRule(2, {"a": 0, "b": 1}, strict=True),
            "line 2: label 'c' is not among the classes.* a, b",
        ),
        (
            ("a",),
            LabelRule(2, strict=True),
            "'a' is not among the classes, which are given by number",
        ),
    ],
)
def test_what_is_no_class_of_the_model(
    values: tuple[Any, ...], rule: LabelRule, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        numbered(*values, rule=rule)
