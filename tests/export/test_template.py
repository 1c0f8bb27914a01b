"""Filling templates, plain data as source, YAML below a comment."""

import ast
import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.export.template import WIDTH, fill, import_from, literal, template, yaml_file

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def test_a_slot_on_its_own_line_takes_any_number_of_lines_at_its_indent() -> None:
    text = "def f():\n    $body\n    $nothing\n    return $value\n"
    filled = fill(text, {"body": ["if x:", "    y()"], "nothing": [], "value": "1"})
    assert filled == "def f():\n    if x:\n        y()\n    return 1\n"


def test_blank_lines_of_a_slot_stay_free_of_spaces() -> None:
    assert fill("    $body", {"body": "a\n\nb"}) == "    a\n\n    b\n"


def test_a_slot_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="body"):
        fill("$body", {})


def test_a_slot_inside_a_filled_value_is_left_alone() -> None:
    assert fill("x = $value", {"value": '"$value"'}) == 'x = "$value"\n'


@settings(max_examples=50, deadline=None)
@given(DATA)
def test_literal_is_read_back_as_the_same_data(value: Any) -> None:
    assert ast.literal_eval(literal(value)) == value


def test_literal_breaks_what_does_not_fit_and_keeps_what_does() -> None:
    wide = {"first": 0, "a": list(range(40)), "b": [1, 2], "c": 3}
    lines = literal(wide).splitlines()
    assert lines[0] == "{" and lines[-1] == "}"
    assert '    "b": [1, 2], "c": 3,' in lines
    assert all(len(line) <= WIDTH for line in lines)


def test_literal_writes_numbers_that_have_no_literal() -> None:
    assert math.isinf(eval(literal([math.inf]))[0])
    assert literal(math.nan) == 'float("nan")'


def test_lines_end_at_line_feeds_alone() -> None:
    assert (
        fill("f:\n    $body\n", {"body": "a\x0cb\u2028c\x85\nd"})
        == "f:\n    a\x0cb\u2028c\n    d\n"
    )


def test_a_template_is_found_beside_the_module() -> None:
    assert "$train_step" in template("train")


def test_imports_that_do_not_fit_are_several() -> None:
    assert import_from("torch", "nn", "optim") == "from torch import nn, optim"
    many = import_from("somewhere", *(f"name_{number}" for number in range(12)))
    assert all(len(line) <= WIDTH for line in many.splitlines())
    imported = [alias.name for line in ast.parse(many).body for alias in line.names]
    assert imported == [f"name_{number}" for number in range(12)]


def test_the_header_is_a_comment_and_floats_are_numbers_to_any_parser() -> None:
    text = yaml_file(("one", "", "two"), {"rate": 2e-5, "zero": 0.0, "none": None})
    assert text.startswith("# one\n#\n# two\n\n")
    assert "rate: 2.0e-05" in text
    assert yaml.safe_load(text) == {"rate": 2e-5, "zero": 0.0, "none": None}
