"""Parquet and Arrow files: only what is wanted is read, and images within them stay where they are."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from autofit.core.errors import InputError
from autofit.data.columnar import Stored, arrow_source, parquet_source, without_nulls
from autofit.data.row_source import Wanted

WANTED = Wanted(frozenset({"text", "image"}), lambda row: True, text=False, by_line=False)
IMAGES = [{"bytes": b"one", "path": None}, {"bytes": None, "path": "b.png"}, None]
COLUMNS = {"text": ["a", "b", "c"], "other": [1, 2, 3], "image": IMAGES}


def sources(folder: Path, columns: dict[str, Any]) -> list[Any]:
    """The rows of the same table as Parquet and as Arrow."""
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return [
        parquet_source(folder / "a.parquet", None, WANTED),
        arrow_source(folder / "a.arrow", None, WANTED),
        parquet_source(folder / "a.parquet", (folder / "a.parquet").read_bytes(), WANTED),
        arrow_source(folder / "a.arrow", (folder / "a.arrow").read_bytes(), WANTED),
    ]


def test_wanted_columns_and_images(tmp_path: Path) -> None:
    for source in sources(tmp_path, COLUMNS):
        located = list(source.rows)
        assert [location.rpartition(", ")[2] for location, _ in located] == [
            "row 1",
            "row 2",
            "row 3",
        ]
        rows = [row for _, row in located]
        assert [row["text"] for row in rows] == ["a", "b", "c"]
        assert rows[0].keys() == {"text", "image"}
        first, second = rows[0]["image"], rows[1]["image"]
        assert isinstance(first, Stored)
        assert first.source().read() == b"one"
        assert second.source() == "b.png"
        assert rows[2]["image"] is None
        assert source.remedy == "Its columns are text, other, image."


def test_lists_of_images_without_any_other_column(tmp_path: Path) -> None:
    for source in sources(tmp_path, {"image": [IMAGES[:2], []]}):
        (_, row), (_, empty) = source.rows
        assert [str(image) for image in row["image"]] == ["number 1", "number 2"]
        assert row["image"][1].source() == "b.png"
        assert empty["image"] == []


def test_rows_without_a_wanted_column_are_counted(tmp_path: Path) -> None:
    for source in sources(tmp_path, {"other": [1, 2, 3]}):
        assert [row for _, row in source.rows] == [{}, {}, {}]


def test_a_damaged_file_whose_name_holds_braces(tmp_path: Path) -> None:
    path = tmp_path / "{rows}.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"\{rows\}\.parquet cannot be read as Parquet: "):
        parquet_source(path, None, WANTED)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": None, "b": 1}, {"b": 1}),
        ([{"a": {"b": None}}, None], [{"a": {}}, None]),
        ("a", "a"),
    ],
)
def test_keys_that_arrow_filled_in_are_taken_out(value: Any, expected: Any) -> None:
    assert without_nulls(value) == expected
