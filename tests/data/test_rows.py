"""Rows of every kind of file, in every form, and each wrong one told in one sentence with its place."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from autofit.core.errors import InputError
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, PAIR, TEXT, Form, read_rows
from tests.data.letters import lines

CAUSAL = (TEXT, COMPLETION, MESSAGES)
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def columns(path: Path, *forms: Form, **options: Any) -> dict[str, list[Any]]:
    return dict(read_rows(path, forms or CAUSAL, **options).columns)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a"])
def test_any_other_file_is_one_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "ä"}\n\nb', encoding="utf-8")
    assert columns(tmp_path / name) == {"text": ['{"text": "ä"}\n\nb']}


def test_a_name_that_is_no_utf_8_is_told_in_escapes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.txt")
    path.write_text("text")
    (location,) = read_rows(path, CAUSAL).locations
    assert location.endswith("/\\udcff.txt")


def test_or_a_text_in_each_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n \ntwo\u2028three")
    rows = read_rows(tmp_path / "a.txt", CAUSAL, by_line=True)
    assert rows.columns["text"] == ["one", "two\u2028three"]
    assert [location.rpartition(", ")[2] for location in rows.locations] == ["line 1", "line 4"]


def test_json_lines(tmp_path: Path) -> None:
    assert columns(lines(tmp_path, {"text": "a", "other": 1}, {"text": ""})) == {"text": ["a", ""]}
    assert columns(lines(tmp_path, {"prompt": "a", "completion": "b"})) == {
        "prompt": ["a"],
        "completion": ["b"],
    }
    assert [
        json.loads(each) for each in columns(lines(tmp_path, {"messages": TURNS}))["messages"]
    ] == [TURNS]
    assert columns(lines(tmp_path, {"text": "a", "label": True}), LABELLED) == {
        "text": ["a"],
        "label": [True],
    }


def test_blank_lines_and_line_separators_inside_text_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "ab\u2028cd"}\n\n  \n{"text": "e"}', encoding="utf-8"
    )
    assert columns(tmp_path / "a.jsonl") == {"text": ["ab\u2028cd", "e"]}


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"text": "ab"}'), ("a.txt", "ab")])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(f"\ufeff{content}", encoding="utf-8")
    assert columns(tmp_path / name) == {"text": ["ab"]}


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_csv(tmp_path: Path, start: str) -> None:
    content = f'{start}id,text,label\n1,"two\nlines, quoted",good\n2,,bad\n'
    (tmp_path / "a.CSV").write_text(content, encoding="utf-8")
    rows = read_rows(tmp_path / "a.CSV", (LABELLED,))
    assert dict(rows.columns) == {"text": ["two\nlines, quoted", ""], "label": ["good", "bad"]}
    assert rows.locations[1].endswith("line 4")


def test_a_number_of_thousands_of_digits_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\na,{'9' * 5000}\nb,{'9' * 18}\n")
    assert columns(tmp_path / "a.csv", LABELLED)["label"] == ["9" * 5000, 10**18 - 1]


def test_numbers_as_labels_of_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "text,label\n" + "".join(f"a,{label}\n" for label in ("3", "-1", "1.5", "1_0"))
    )
    assert columns(tmp_path / "a.csv", LABELLED)["label"] == [3, -1, 1.5, "1_0"]


def test_a_data_set_on_disk(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"text": "a", "n": 1}, {"text": "b", "n": 2}]).with_format(
        "numpy"
    )
    data.save_to_disk(str(tmp_path / "one"))
    assert columns(tmp_path / "one") == {"text": ["a", "b"]}
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(tmp_path / "two"))
    assert columns(tmp_path / "two") == {"text": ["a", "b"]}


def test_keys_that_a_data_set_fills_up_are_left_out_of_messages(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a", "name": "Eve"},
                {"role": "assistant", "content": "b"},
            ]
        }
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path))
    (found,) = columns(tmp_path)["messages"]
    assert json.loads(found) == rows[0]["messages"]


def test_a_list_in_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '[\n {"text": "a",\n "label": 1},\n {"text": "b", "label": 0}\n]'
    )
    rows = read_rows(tmp_path / "a.json", (LABELLED,))
    assert dict(rows.columns) == {"text": ["a", "b"], "label": [1, 0]}
    assert rows.locations[1].endswith("a.json, row 2")
    (tmp_path / "a.json").write_text('[{"text": "a", "label": 1}, 7]')
    with pytest.raises(
        InputError, match=r"a\.json, row 2 lacks text and label\. Every row needs them"
    ):
        read_rows(tmp_path / "a.json", (LABELLED,))
    (tmp_path / "a.json").write_text('[{"text": "a"')
    with pytest.raises(InputError, match=r"a\.json is not JSON"):
        read_rows(tmp_path / "a.json", (LABELLED,))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("source", "target"),
        ("prompt", "completion"),
        ("text", "summary"),
        ("document", "summary"),
        ("article", "highlights"),
        ("dialogue", "summary"),
    ],
)
def test_the_names_that_pairs_of_texts_have(tmp_path: Path, source: str, target: str) -> None:
    row = {"id": "1", source: "a", target: "b"}
    assert columns(lines(tmp_path, row), PAIR) == {"source": ["a"], "target": ["b"]}
    (tmp_path / "a.csv").write_text(f"id,{source},{target}\n1,a,b\n")
    assert columns(tmp_path / "a.csv", PAIR) == {"source": ["a"], "target": ["b"]}
    datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / "saved"))
    assert columns(tmp_path / "saved", PAIR) == {"source": ["a"], "target": ["b"]}


# What cannot be read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ('{"text": "a"}\n{"text": }', r"line 2 is not JSON: Expecting value\."),
        ("[" * 100_000, "line 1 is not JSON: maximum recursion depth exceeded"),
        ('{"text": ' + "9" * 5000 + "}", "line 1 is not JSON: Exceeds the limit"),
        ('{"text": "a"}\n{"label": 1}', "line 2 lacks text"),
        ('{"other": 1}', r"line 1 lacks text \(or prompt and completion or messages\)"),
        ('{"prompt": "a"}', "line 1 lacks text"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}', "line 2 lacks completion"),
        ('["text"]', "line 1 lacks text"),
        ('{"text": 5}', "line 1: text must be text, not int"),
        ('{"text": "\\ud800"}', "line 1: text holds half of a surrogate pair"),
        ('{"messages": "Hi"}', "line 1: messages must be a list"),
        ('{"messages": []}', "line 1: messages must be a list of at least one"),
        ('{"messages": ["Hi"]}', "line 1: every message must be an object with a role"),
        ('{"messages": [{"role": "user"}]}', "line 1: the message of user has no content"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=rf"a\.jsonl,? {words}") as caught:
        columns(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("text,label\n", "is empty"),
        (
            "text,class\na,b\n",
            r"line 2 lacks label\. The first line must name the columns; it names text, class",
        ),
        ("text,label\na,b\nc\n", "line 3 lacks label"),
        ("text,label\na,\n", "line 2 lacks label"),
        ('text,label\n"a"b,c\n', "line 2 is not CSV"),
        (f"text,label\n{'a' * 140_000},b\n", "line 2 is not CSV: field larger"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        columns(tmp_path / "a.csv", LABELLED)


def test_labels_are_needed_to_classify(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1 lacks text and label"):
        columns(lines(tmp_path, {"t": "a"}), LABELLED)
    with pytest.raises(InputError, match="line 1 lacks label"):
        columns(lines(tmp_path, {"text": "a", "label": None}), LABELLED)
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(InputError, match=r"a\.txt, line 1 is not JSON: .*Give one object a line"):
        columns(tmp_path / "a.txt", LABELLED)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(InputError, match=r"cannot be read as text: .*Give UTF-8 text\."):
        columns(tmp_path / "a.txt")


def test_directories_that_hold_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"the directory .* is none that Dataset\.save_to_disk wrote, and holds no"
    ):
        columns(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        columns(tmp_path)
    assert "\n" not in str(caught.value)


def test_data_sets_without_what_is_needed(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"text": "a"}, {"text": None}])
    datasets.DatasetDict(test=data).save_to_disk(str(tmp_path / "test"))
    with pytest.raises(InputError, match="has no split named train, but test"):
        columns(tmp_path / "test")
    with pytest.raises(InputError, match="row 2 lacks text"):
        data.save_to_disk(str(tmp_path / "none"))
        columns(tmp_path / "none")
    with pytest.raises(InputError, match=r"row 1 lacks label\. Its columns are text"):
        columns(tmp_path / "none", LABELLED)


def test_a_pair_without_its_second_text(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="line 2 lacks target or completion or summary or highlights"
    ):
        read_rows(lines(tmp_path, {"text": "a", "summary": "b"}, {"text": "a"}), (PAIR,))
