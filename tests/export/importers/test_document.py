"""A file keeps all that is not changed: comments, order, quotes, anchors."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.export.importers.document import Document, flat

TEXT = """\
# A file of somebody's.
base: &base
  rate: 2.0e-4   # learnt
  "quoted": 'as it is'
model: some/name  # the model

empty:
kwargs: {use_reentrant: true, every: 2}
nested:
    deep:
        value: 1

items:
  - one
  - two
last: no
"""
PATHS = ("base.rate", "base.quoted", "model", "empty", "kwargs.every", "nested.deep.value", "last")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.lists(st.integers(0, 9), max_size=3),
)


def document() -> Document:
    return Document.of(TEXT, "file.yaml")


def test_nothing_changed_is_the_same_text() -> None:
    assert document().changed({}) == TEXT


@given(st.dictionaries(st.sampled_from((*PATHS, "new", "kwargs.new", "nested.deep.new")), VALUES))
def test_only_what_is_changed_differs(values: dict[str, object]) -> None:
    text = document().changed(values)
    found = Document.of(text, "file.yaml").keys
    expected = {**document().keys, **values}
    for path, value in expected.items():
        if value == [] or isinstance(value, float):
            continue
        assert found.get(path) == value, path
    for line in ("# A file of somebody's.", "items:", "  - one", "  - two"):
        assert f"{line}\n" in text
    if "base.rate" in values and isinstance(values["base.rate"], bool):
        assert "   # learnt" in text


def test_comments_behind_a_value_stay() -> None:
    text = document().changed({"model": "other", "base.rate": 0.1, "empty": 5})
    assert "model: other  # the model\n" in text
    assert "  rate: 0.1   # learnt\n" in text
    assert "empty: 5\n" in text


def test_a_new_key_of_a_mapping_comes_into_it_and_others_to_the_end() -> None:
    text = document().changed({"nested.deep.more": 2, "kwargs.more": 3, "group.one": 4})
    assert yaml.safe_load(text)["nested"]["deep"] == {"value": 1, "more": 2}
    assert yaml.safe_load(text)["kwargs"]["more"] == 3
    assert text.endswith("last: no\ngroup:\n  one: 4\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b\n", "should hold a mapping"),
        ("a: !!python/object:os.system x\n", "could not determine a constructor"),
        ("a: 1\na: 2\n", "given twice"),
        ("a: [\n", "cannot be read as YAML"),
    ],
)
def test_what_is_no_file_of_keys_is_told(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Document.of(text, "file.yaml")


@pytest.mark.parametrize(
    "text",
    ['{\n  "a": 1,\n  "in": {"b": "x", "c": [1]}\n}\n', '{"a": 1, "in": {"b": "x", "c": [1]}}'],
    ids=["lines", "one line"],
)
@given(values=st.dictionaries(st.sampled_from(("a", "in.b", "new", "in.new")), VALUES))
def test_json_stays_json(text: str, values: dict[str, object]) -> None:
    found = Document.of(text, "file.json")
    assert found.changed({}) == text
    told = flat(json.loads(found.changed(values)))
    assert told == {**found.keys, **values}


def test_ends_of_lines_stay_as_they_are() -> None:
    text = "a: 1\r\nin:\r\n  b: 2\r\n"
    changed = Document.of(text, "file.yaml").changed({"a": 3, "in.c": 4, "new": 5})
    assert changed == "a: 3\r\nin:\r\n  c: 4\r\n  b: 2\r\nnew: 5\r\n"


ALIASES = """\
first: &word one  # said
second: *word
rates: &rates
  low: 1
  high: [2, 3]
same: *rates
more:
  <<: *rates
  own: 4
last: no
"""


@given(
    st.dictionaries(
        st.sampled_from(
            ("first", "second", "rates.low", "same.low", "same.new", "more.low", "more.own", "last")
        ),
        st.one_of(st.booleans(), st.integers(0, 9), st.sampled_from(["word", "no", "1e-3"])),
    )
)
def test_what_refers_to_a_changed_value_keeps_what_it_said(values: dict[str, object]) -> None:
    document = Document.of(ALIASES, "file.yaml")
    changed = document.changed(values)
    assert Document.of(changed, "file.yaml").keys == {**document.keys, **values}
    if values.keys() <= {"last", "more.own"}:  # which nothing refers to
        assert changed.count("*") == ALIASES.count("*")


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("kwargs", {"every": 3}, "kwargs: {every: 3}\n"),
        ("kwargs", False, "kwargs: false\n"),
        ("nested", {"deep": {"save": ["a", "b"]}}, "nested: {deep: {save: [a, b]}}\n"),
        ("nested.deep", None, "    deep: null\n"),
    ],
)
def test_a_mapping_is_replaced_as_a_whole(path: str, value: object, line: str) -> None:
    """What it held goes, and what stands behind it stays."""
    text = f"{TEXT}block:  # why\n  one: 1\n  two:\n    - 2\n# behind\nend: 1\n"
    document = Document.of(text, "file.yaml")
    changed = document.changed({path: value})
    assert line in changed

    expected = {key: old for key, old in document.keys.items() if not key.startswith(f"{path}.")}
    expected |= flat({path: value})
    assert Document.of(changed, "file.yaml").keys == expected

    other = document.changed({"block": False})
    assert other.endswith("block:  # why\n  false\n# behind\nend: 1\n")


def test_a_mapping_of_json_is_replaced_as_a_whole() -> None:
    text = '{"a" : {"b": 1},\n "c": [1]}'
    changed = Document.of(text, "file.json").changed({"a": {"d": True}})
    assert json.loads(changed) == {"a": {"d": True}, "c": [1]}
