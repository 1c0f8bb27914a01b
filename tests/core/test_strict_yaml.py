"""YAML is read strictly: plain data only, no key twice, and every failure is one sentence with a line."""

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autofit.core import strict_yaml
from autofit.core.errors import InputError
from autofit.core.strict_yaml import dump, load_mapping, load_own, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: [x, 2.5, true, null]", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("", None),
        ("- 1", [1]),
        ("base: &b {x: 1}\nmore: {<<: *b, y: 2}", {"base": {"x": 1}, "more": {"x": 1, "y": 2}}),
        ("base: &b {x: 1}\nmore: {<<: *b, x: 2}", {"base": {"x": 1}, "more": {"x": 2}}),
    ],
)
def test_plain_data(text: str, value: object) -> None:
    assert parse(text, "the test") == value


WIDE = ", ".join(f"k{n}: 1" for n in range(500))


def merging(depth: int, width: int, first: str = "{x: 1, y: 2}") -> str:
    """A mapping that merges one so many times, which merges another so many times, and so on."""
    text = f"&m0 {first}"
    for number in range(1, depth):
        text = f"&m{number} {{<<: [{', '.join([text, *[f'*m{number - 1}'] * (width - 1)])}]}}"
    return text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a: {merging(12, 9)}", r"its mappings merge too much \(line 1\)"),
        (f"a: {merging(40, 2)}", "merge too much"),
        (f"a: !!set {merging(12, 9).removeprefix('&m11 ')}", "merge too much"),
        (f"a: !!omap [b: {merging(12, 9)}]", "merge too much"),
        (
            f"b: &b {{{WIDE}}}\n" + "".join(f"{n}: {{<<: *b}}\n" for n in range(500)),
            "merge too much",
        ),
        ("a: &a\n  <<: *a\n  x: 1", "merge too much"),
        (f"a: 1{':11' * 100_000}", r"a number has 300,001 characters \(line 1\)"),
        (f"a: -1{':11' * 100_000}.5", "a number has"),
        (f"a: !!int '1{':11' * 100_000}'", "a number has"),
        (f"a: !!float '1{':11' * 100_000}'", "a number has"),
        (f"a: 0x{'f' * 100_000}", "a number has"),
        (f"a: 1{':11' * 300}.5", "too large"),
    ],
)
def test_little_text_is_no_endless_work(text: str, reason: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError, match=reason):
        parse(text, "the test")
    assert time.process_time() - began < 5


def test_merges_and_numbers_of_any_use_are_read() -> None:
    assert parse(f"a: {merging(6, 4)}", "the test") == {"a": {"x": 1, "y": 2}}
    assert parse("a: 1:30:00\nb: 1:30.5\nc: 0x1f", "the test") == {"a": 5400, "b": 90.5, "c": 31}


def test_what_merges_nothing_may_be_as_large_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_yaml, "_MOST_MERGED", 10)
    assert len(parse("".join(f"k{n}: 1\n" for n in range(20)), "the test")) == 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3", r"the key 'a' is given twice \(line 3\)"),
        ("top:\n  x: 1\n  x: 1", r"the key 'x' is given twice \(line 3\)"),
        ("- {a: 1, a: 2}", r"the key 'a' is given twice \(line 1\)"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: !unknown 1", "could not determine a constructor"),
        ("a: [1, 2", r"\(line 1\)"),
        ("a: b: c", r"\(line 1\)"),
        ("\tx: 1", "line 1"),
        ("a: *missing", "undefined alias"),
        ("--- 1\n--- 2", "single document|another document"),
        ("? [1, 2]\n: 3", "a key must be a plain word"),
        ("? {a: 1}\n: 3", "a key must be a plain word"),
        ("a: \x00", "special characters"),
        ("a: 2024-13-45", "month must be in 1..12"),
        ("a: !!int x", "invalid literal"),
        ("a: !!bool x", "cannot be read"),
        ("a: !!timestamp x", "cannot be read"),
        ("[" * 1500, "cannot be read"),
        (
            "\n".join(
                f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9 if n else 'ha')}]" for n in range(12)
            ),
            "hold too much",
        ),
        ("x: &x [*x]", "recursive"),
        ("? !!set {a, b}\n: 3", "a key must be a plain word"),
        (f"a: {'1' * 5000}", "cannot be read"),
        (f"a: *{'x' * 10**6}", "undefined alias 'xx"),
        (f"? {'x' * 10000}\n: 1\n? {'x' * 10000}\n: 1", "is given twice"),
    ],
)
def test_what_is_not_is_an_error_that_names_the_source(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        parse(text, "space.yaml")
    assert caught.value.message.startswith("space.yaml cannot be read as YAML: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@given(st.text(st.sampled_from("a1:-[]{}&*!|>%@`'\"#,? \n\t.=~<0"), max_size=40))
def test_no_text_gets_past_as_another_error(text: str) -> None:
    try:
        parse(text, "the test")
    except InputError as error:
        assert "the test" in str(error)


words = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]) | st.just("\n"), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=10,
)


@given(plain)
def test_what_is_dumped_is_read_back(value: object) -> None:
    assert parse(dump(value), "the test") == value


def test_the_order_of_keys_stays() -> None:
    assert dump({"b": 1, "a": {"d": 2, "c": 3}}) == "b: 1\na:\n  d: 2\n  c: 3\n"


def test_a_file_with_one_mapping(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: grün\n", encoding="utf-8")
    assert load_mapping(path) == {"name": "grün"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1", "should hold a mapping of names to values, not list"),
        (b"", "should hold a mapping of names to values, not NoneType"),
        (b"1: 2", "should hold a mapping of names to values"),
        (b"\xff\xfe\xff", "cannot be read"),
        (b"a: 1\na: 2", "the key 'a' is given twice"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_mapping(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml is not there\. Check the path\."):
        load_mapping(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_mapping(tmp_path)


def test_only_regular_files_of_some_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    for name, reason in (("pipe", "it is no regular file"), ("huge", "File too large")):
        with pytest.raises(InputError, match=reason):
            load_mapping(tmp_path / name)
    with pytest.raises(InputError, match="it is no regular file"):
        load_mapping(Path("/dev/zero"))


PACKAGE = Path(strict_yaml.__file__).parents[1]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_own_files_are_read_as_those_of_others(path: Path) -> None:
    assert repr(load_own(path)) == repr(load_mapping(path))


def test_an_own_file_has_no_key_twice_either(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: 1\na: 2")
    with pytest.raises(yaml.YAMLError, match="the key 'a' is given twice"):
        load_own(tmp_path / "own.yaml")
