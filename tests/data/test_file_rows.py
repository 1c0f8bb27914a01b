"""The same rows are read alike out of every kind of file, and nothing is learnt as text that is something else."""

import bz2
import gzip
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, TEXT, Form, Rows, read_rows

CAUSAL = (TEXT, COMPLETION, MESSAGES)
Table = list[dict[str, Any]]


def json_lines(rows: Table) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def document(rows: Any, indent: int | None = None) -> bytes:
    return json.dumps(rows, indent=indent).encode()


def by_column(rows: Table) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def by_number(rows: Table) -> dict[str, dict[str, Any]]:
    """As `to_json` of pandas writes them."""
    return {name: {str(number): row[name] for number, row in enumerate(rows)} for name in rows[0]}


def delimited(rows: Table, delimiter: str) -> bytes:
    records = [list(rows[0]), *([str(row[name]) for name in rows[0]] for row in rows)]
    quoted = [['"' + cell.replace('"', '""') + '"' for cell in record] for record in records]
    return "".join(delimiter.join(record) + "\n" for record in quoted).encode()


def parquet(rows: Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
    return bytes(sink.getvalue())


def arrow(rows: Table, opened: Any) -> bytes:
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with opened(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


NESTED: dict[str, Callable[[Table], bytes]] = {
    "a.jsonl": json_lines,
    "a.ndjson": json_lines,
    "lines.json": json_lines,
    "list.json": document,
    "pretty.json": lambda rows: document(rows, indent=2),
    "list.jsonl": lambda rows: document(rows, indent=2),
    "list.txt": document,
    "data.json": lambda rows: document({"data": rows}),
    "other.json": lambda rows: document({"version": "1", "examples": rows}, indent=1),
    "columns.json": lambda rows: document(by_column(rows)),
    "pandas.json": lambda rows: document(by_number(rows)),
    "a.parquet": parquet,
    "stream.arrow": lambda rows: arrow(rows, pyarrow.ipc.new_stream),
    "file.arrow": lambda rows: arrow(rows, pyarrow.ipc.new_file),
    "a.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
    "a.jsonl.gz": lambda rows: gzip.compress(json_lines(rows)),
    "a.json.bz2": lambda rows: bz2.compress(document(rows)),
    "a.jsonl.xz": lambda rows: lzma.compress(json_lines(rows)),
    "a.jsonl.zst": lambda rows: zstd(json_lines(rows)[:20]) + zstd(json_lines(rows)[20:]),
    "unpacked.jsonl.gz": json_lines,
    "packed.jsonl": lambda rows: gzip.compress(json_lines(rows)),
}
FLAT = {
    "a.csv": lambda rows: delimited(rows, ","),
    "a.tsv": lambda rows: delimited(rows, "\t"),
    "semicolons.csv": lambda rows: delimited(rows, ";"),
    "commas.tsv": lambda rows: delimited(rows, ","),
    "a.csv.gz": lambda rows: gzip.compress(delimited(rows, ",")),
}


def written(folder: Path, name: str, content: bytes | str) -> Path:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


def read(folder: Path, name: str, content: bytes | str, *forms: Form, **options: Any) -> Rows:
    return read_rows(written(folder, name, content), forms or CAUSAL, **options)


def parsed(rows: Rows) -> dict[str, list[Any]]:
    """The columns, chats and tools out of their JSON, where Arrow orders keys otherwise."""
    if rows.form != MESSAGES:
        return dict(rows.columns)
    return {
        name: [json.loads(cell or "[]") for cell in column] for name, column in rows.columns.items()
    }


def check_alike(
    rows: Table, forms: tuple[Form, ...], kinds: dict[str, Callable[[Table], bytes]]
) -> None:
    """The rows are the same from each kind of file, each with its number."""
    with tempfile.TemporaryDirectory() as folder:
        expected = read(Path(folder), "a.jsonl", json_lines(rows), *forms)
        for name, content in kinds.items():
            found = read(Path(folder), name, content(rows), *forms)
            assert (name, found.form, parsed(found)) == (name, expected.form, parsed(expected))
            assert len(found.locations) == len(rows)
            assert all(f"/{name}, " in location for location in found.locations)


# What no text field may hold: half of a surrogate pair; and CSV's line breaks become \n.
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1, max_size=12
)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"prompt": TEXTS, "completion": TEXTS}), min_size=1, max_size=5)
)
def test_flat_rows_are_the_same_from_every_kind_of_file(rows: Table) -> None:
    check_alike(rows, CAUSAL, NESTED | FLAT)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({"text": TEXTS, "label": st.integers(-5, 10**17)}),
        min_size=1,
        max_size=5,
    )
)
def test_so_are_numbers_as_labels(rows: Table) -> None:
    check_alike(rows, (LABELLED,), NESTED | FLAT)


TURNS = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "messages": st.lists(TURNS, min_size=1, max_size=3),
                "tools": st.sampled_from([[], [CALL]]),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_so_are_chats_and_their_tools(rows: Table) -> None:
    check_alike(rows, CAUSAL, NESTED)


# Text


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.log"])
@pytest.mark.parametrize(
    "text",
    [
        "one\n\ntwo\n",
        '{"text": "ä"}\n\nb',
        '{\n "name": "a project",\n "files": ["a"]\n}',
        "text, such as this\nor, that",
        "[1, 2]",
        "{not json}\n{at all}",
        "id,text\nhas, three, fields",
        "BZh and so on",
    ],
)
def test_what_is_text_stays_text(tmp_path: Path, name: str, text: str) -> None:
    found = read(tmp_path, name, text)
    assert found.columns == {"text": [text]}
    assert found.notes == ()


@pytest.mark.parametrize("by_line", [True, False])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', "JSON"),
        ('[{"text": "a"},\n {"text": "b"}]', "JSON"),
        ('{"data": [{"text": "a"}, {"text": "b"}]}', "JSON"),
        ("id,text\n1,a\n2,b\n", "rows under a header"),
        ("id\ttext\n1\ta\n2\tb\n", "rows under a header"),
    ],
)
def test_rows_in_a_file_that_is_named_as_text_are_read_as_rows(
    tmp_path: Path, text: str, kind: str, by_line: bool
) -> None:
    found = read(tmp_path, "a.txt", text, by_line=by_line)
    assert found.columns == {"text": ["a", "b"]}
    assert found.notes == (f"{tmp_path / 'a.txt'} holds {kind}, and is read as such.",)


def test_json_lines_that_hold_nothing_to_learn_are_not_learnt_as_text(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"line 1 lacks text .*put it into rows with a field named text"
    ):
        read(tmp_path, "a.txt", '{"a": 1}\n{"a": 2}')


def test_json_that_is_named_as_csv(tmp_path: Path) -> None:
    found = read(tmp_path, "a.csv", '{"text": "a"}\n{"text": "b"}')
    assert found.columns == {"text": ["a", "b"]}
    assert "holds JSON" in found.notes[0]


# Directories


def test_files_of_a_directory_make_one_data_set_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        written(tmp_path, f"part-{number:02}.jsonl", f'{{"text": "{number}"}}')
    written(tmp_path, "Thumbs.db", b"\0")
    found = read_rows(tmp_path, CAUSAL)
    assert found.columns == {"text": ["1", "2", "10"]}
    assert [location.rpartition("/")[2] for location in found.locations][
        1
    ] == "part-02.jsonl, line 1"
    assert found.notes == ()


def test_texts_of_a_directory(tmp_path: Path) -> None:
    written(tmp_path, "a.txt", "one\ntwo")
    written(tmp_path, "b.md", "three")
    assert read_rows(tmp_path, CAUSAL).columns == {"text": ["one\ntwo", "three"]}
    assert read_rows(tmp_path, CAUSAL, by_line=True).columns == {"text": ["one", "two", "three"]}


def test_what_is_said_of_many_files_is_said_once(tmp_path: Path) -> None:
    for name in "abc":
        written(tmp_path, name, '{"text": "a"}\n{"text": "b"}')
    (note,) = read_rows(tmp_path, CAUSAL).notes
    assert note == (
        f"{tmp_path / 'a'} holds JSON, and is read as such. So it is with 2 more of the files in {tmp_path}."
    )


# What cannot be read


@pytest.mark.parametrize("forms", [CAUSAL, (LABELLED,)])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"text", "is named as Parquet, and holds something else. Give text, JSON"),
        ("a.parquet", b"PAR1text", "cannot be read as Parquet: "),
        ("a.arrow", b"ARROW1", "cannot be read as Arrow: "),
        ("a.arrow", b"\xff\xff\xff\xffa", "cannot be read as Arrow: "),
        ("a.parquet", b"", "is empty"),
    ],
)
def test_files_that_are_not_what_their_names_say(
    tmp_path: Path, name: str, content: bytes, words: str, forms: tuple[Form, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, name, content, *forms)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
