"""JSON documents and tables, by what they hold; what is wrong with one is told with its place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.data.contents import TextFile
from autofit.data.row_source import Wanted
from autofit.data.text_rows import csv_source, json_source, plain_delimiter, plain_json_source

NAMES = frozenset({"text", "prompt", "completion", "messages", "tokens", "tags"})


def fits(row: Mapping[str, Any]) -> bool:
    fields = {name for name in row if row[name] is not None}
    return any(
        form <= fields
        for form in ({"text"}, {"prompt", "completion"}, {"messages"}, {"tokens", "tags"})
    )


def text_of(name: str, text: str) -> TextFile:
    return TextFile(Path(name), lambda: iter([(text, len(text))]))


WANTED = Wanted(NAMES, fits, text=True, by_line=False)
A, B = {"text": "a"}, {"text": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
WORDS = {"tokens": ["In", "Oslo"], "tags": ["O", "B"]}


def rows(name: str, text: str, notes: list[str] | None = None) -> list[Any]:
    return [
        row
        for _, row in json_source(text_of(name, text), WANTED, [] if notes is None else notes).rows
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([A, B], [A, B]),
        ({"data": [A, B]}, [A, B]),
        ({"version": 1, "license": ["x"], "rows": [A]}, [A]),
        ({"text": ["a", "b"]}, [A, B]),
        ({"text": {"0": "a", "1": "b"}}, [A, B]),
        ({"messages": [CHAT["messages"]]}, [CHAT]),
        ({"tokens": [WORDS["tokens"]], "tags": [WORDS["tags"]]}, [WORDS]),
        (A, [A]),
        (CHAT, [CHAT]),
        (WORDS, [WORDS]),
        (
            {"prompt": ["a", "b"], "completion": ["c"]},
            [{"prompt": ["a", "b"], "completion": ["c"]}],
        ),
        (
            {"text": {"0": "a"}, "completion": {"1": "b"}},
            [{"text": {"0": "a"}, "completion": {"1": "b"}}],
        ),
        ({"other": 1}, [{"other": 1}]),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_what_a_json_document_holds(
    name: str, document: Any, expected: list[Any], indent: int | None
) -> None:
    assert rows(name, json.dumps(document, indent=indent)) == expected


def test_of_several_lists_that_of_train() -> None:
    notes: list[str] = []
    assert rows("a.json", json.dumps({"test": [B, B], "train": [A]}), notes) == [A]
    assert notes == ["a.json holds several lists of rows: train is read; left out: test."]
    with pytest.raises(
        InputError, match=r"several lists of rows \(one, two\), and none is named train"
    ):
        rows("a.json", json.dumps({"one": [A], "two": [B]}))


def test_json_that_is_broken_is_told_with_its_line() -> None:
    with pytest.raises(InputError, match=r"a\.json is not JSON: Expecting value at line 3\."):
        rows("a.json", '{"data": [\n{"text": "a"},\n{"text": }]}')


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}\n{"b": 2}', [{"a": 1}, {"b": 2}]),
        ('{"text": "a"}', [A]),
        ('[{"text": "a"}]', [A]),
        ('{"data": [{"text": "a"}]}', [A]),
        ('{"name": "settings", "data": [{"a": 1}]}', None),
        ('{"a": ["b"]}', None),
        ('{"a": 1}', None),
        ('{"a": 1}\nb', None),
        ('["a"]', None),
        ('{"text": ', None),
        ("text", None),
    ],
)
def test_json_in_a_file_of_another_name(text: str, found: list[Any] | None) -> None:
    source = plain_json_source(text_of("a.txt", text), WANTED, [])
    assert (None if source is None else [row for _, row in source.rows]) == found


def table(text: str, usual: str = ",") -> list[tuple[str, Any]]:
    return list(csv_source(text_of("a.csv", text), WANTED, usual).rows)


@pytest.mark.parametrize("usual", [",", "\t"])
@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_the_delimiter_is_the_one_that_makes_the_columns(usual: str, delimiter: str) -> None:
    text = f"prompt{delimiter}completion\na{delimiter}b\n"
    assert table(text, usual) == [("a.csv, line 2", {"prompt": "a", "completion": "b"})]


@pytest.mark.parametrize("usual", [",", "\t"])
def test_one_column_keeps_the_other_delimiters_in_it(usual: str) -> None:
    other = ";" if usual == "," else ","
    assert [row for _, row in table(f"text\na{other}b\n", usual)] == [{"text": f"a{other}b"}]


def test_a_row_with_more_fields_than_columns_is_not_cut() -> None:
    with pytest.raises(
        InputError,
        match=r"a\.csv, line 3 has more fields than the 2 .* holds ',' in quotation marks",
    ):
        table("prompt,completion\na,b\na, and b,c\n")


def test_a_column_that_is_named_twice() -> None:
    with pytest.raises(InputError, match=r"line 1 names the column text twice"):
        table("text,text\na,b\n")
    assert table("id,id,text\n1,2,a\n")[0][1]["text"] == "a"


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("id,text\n1,a\n", ","),
        ("id;text\n1;a\n", ";"),
        ("prompt\tcompletion\na\tb\n\nc\td", "\t"),
        ("id,text\n", None),
        ("text\na\n", None),
        ("text, and more\na,b\n", None),
        ("id,text\na,b,c\n", None),
        ("id,other\na,b\n", None),
        ('id,text\n"a"b,c\n', None),
    ],
)
def test_tables_in_a_file_of_another_name(text: str, delimiter: str | None) -> None:
    assert plain_delimiter(text_of("a.txt", text), WANTED) == delimiter


def test_a_quotation_mark_that_is_text_swallows_no_lines() -> None:
    assert [row for _, row in table('id\ttext\n1\t"a\nb"\n', "\t")] == [{"id": "1", "text": "a\nb"}]
    with pytest.raises(
        InputError, match=r"line 3 ends a field in quotation marks that holds tabs and lines"
    ):
        table('id\ttext\n1\t"a\n2\tb"\n', "\t")
