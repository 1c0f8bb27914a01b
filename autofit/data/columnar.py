"""Rows of Parquet and Arrow files, and of what `Dataset.save_to_disk` wrote.

Only the wanted columns are read. Images and sound stay where they are until a batch is made of
them. A Parquet file's cannot be read one by one, so they are first written to a file that can.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from autofit.core.errors import InputError
from autofit.core.files import digest
from autofit.data.data_cache import cached_folder, code_digest, content_digest
from autofit.data.failures import failing_as
from autofit.data.row_source import Located, Row, RowSource, Wanted

PARQUET = b"PAR1"  # what such files begin with
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
_ROWS = 1000  # that are made Python's at once
_IMAGES = 64  # that are in memory at once
_MEDIA = "media.arrow"


@dataclass(frozen=True)
class Stored:
    """An image or sound within a data set, read when it is needed.

    Attributes:
        cells: of its column, as Arrow has them.
        number: among those of the row; None where the row has one.
    """

    cells: Any
    row: int
    number: int | None = None

    def source(self) -> str | BinaryIO:
        """Its bytes, or the file that the data set names."""
        cell = self.cells[self.row]
        if self.number is not None:
            cell = cell[self.number]

        value = cell.as_py()
        if value["bytes"] is None:
            return str(value["path"])
        return io.BytesIO(value["bytes"])

    def __str__(self) -> str:
        return f"number {(self.number or 0) + 1}"


MediaFile = str | Stored  # a file that a row names, or what is stored in its place


def saved_source(path: Path, wanted: Wanted) -> RowSource:
    """The rows of what `save_to_disk` wrote; of several splits `train`."""
    import datasets  # with torch: processes that make tokens need neither

    with failing_as(f"the data set in {path} cannot be loaded", "Save it again."):
        data = datasets.load_from_disk(str(path))

    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            splits = ", ".join(data) or "none at all"
            message = f"the data set in {path} has no split named train, but {splits}."
            raise InputError(message, "Give the directory of one of them.")

        data = data["train"]

    plain, media = _divided(data.data.schema, wanted)
    rows = _empty_rows(len(data))
    if plain:
        rows = data.with_format(None).select_columns(plain)

    located = _located(path, rows, _columns_of(data.data, media))
    return RowSource(located, _remedy(data.column_names), columnar=True)


def parquet_source(path: Path, content: bytes | None, wanted: Wanted) -> RowSource:
    """The rows of a Parquet file, or of the content of a compressed one."""
    with _readable(path, "Parquet"):
        file = pyarrow.parquet.ParquetFile(_opened(path, content))
        schema = file.schema_arrow
        plain, media = _divided(schema, wanted)
        cells = {}
        if media:
            cells = _media_cells(path, file, media)

    def rows() -> Iterator[Row]:
        if not plain:
            yield from _empty_rows(file.metadata.num_rows)
            return

        with _readable(path, "Parquet"):
            for batch in file.iter_batches(batch_size=_ROWS, columns=plain):
                yield from batch.to_pylist()

    located = _located(path, rows(), cells)
    return RowSource(located, _remedy(schema.names), columnar=True)


def _media_cells(path: Path, file: Any, media: list[str]) -> dict[str, Any]:
    """The columns of images or sound of a Parquet file, mapped into memory from the cache."""
    fields = [file.schema_arrow.field(name) for name in media]
    schema = pyarrow.schema(fields)

    def build(folder: Path) -> None:
        """Copy the columns, a few rows at a time."""
        target = str(folder / _MEDIA)
        with pyarrow.ipc.new_stream(target, schema) as writer:
            for batch in file.iter_batches(batch_size=_IMAGES, columns=media):
                writer.write_batch(batch.cast(schema))

    key = (content_digest(path), code_digest(), media)
    folder = cached_folder(digest(repr(key)), build)

    mapped = pyarrow.memory_map(os.fsencode(folder / _MEDIA))
    table = pyarrow.ipc.open_stream(mapped).read_all()
    return _columns_of(table, media)


def arrow_source(path: Path, content: bytes | None, wanted: Wanted) -> RowSource:
    """The rows of a file of Arrow's, memory-mapped where it is not compressed."""
    with _readable(path, "Arrow"):
        source = _opened(path, content)
        is_stream = source.read(len(ARROW_STREAM)) == ARROW_STREAM
        source.seek(0)
        open_table = pyarrow.ipc.open_file
        if is_stream:
            open_table = pyarrow.ipc.open_stream
        table = open_table(source).read_all()

    plain, media = _divided(table.schema, wanted)

    def rows() -> Iterator[Row]:
        if not plain:
            yield from _empty_rows(table.num_rows)
            return

        for batch in table.select(plain).to_batches(max_chunksize=_ROWS):
            yield from batch.to_pylist()

    located = _located(path, rows(), _columns_of(table, media))
    return RowSource(located, _remedy(table.column_names), columnar=True)


def without_nulls(value: Any) -> Any:
    """A value without the keys that Arrow filled in with null, because other rows have them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]

    return value


def _opened(path: Path, content: bytes | None) -> Any:
    """A file, memory-mapped, or the content of one that was compressed."""
    if content is None:
        return pyarrow.memory_map(os.fsencode(path))
    return pyarrow.BufferReader(content)


def _columns_of(table: Any, names: Sequence[str]) -> dict[str, Any]:
    """Columns of Arrow's by name."""
    return {name: table.column(name) for name in names}


def _empty_rows(count: int) -> Iterator[Row]:
    """Rows without plain columns."""
    for _ in range(count):
        yield {}


def _located(path: Path, rows: Any, media: Mapping[str, Any]) -> Iterator[Located]:
    """Rows with their locations, and with what is stored in their columns of images or sound."""
    for number, plain in enumerate(rows):
        row = dict(plain)
        for name, cells in media.items():
            row[name] = _stored(cells, number)

        yield f"{path}, row {number + 1}", row


def _remedy(names: Sequence[str]) -> str:
    """What columns there are, as a sentence."""
    listed = ", ".join(names) or "none"
    return f"Its columns are {listed}."


def _readable(path: Path, kind: str) -> AbstractContextManager[None]:
    """Raises InputError where a file cannot be read inside."""
    return failing_as(f"the data file {path} cannot be read as {kind}", "Write it again.")


def _divided(schema: Any, wanted: Wanted) -> tuple[list[str], list[str]]:
    """The wanted columns of a schema: those of plain values, and those of images or sound."""
    plain: list[str] = []
    media: list[str] = []
    for name in schema.names:
        if name not in wanted.names:
            continue
        if _is_media(schema.field(name).type):
            media.append(name)
        else:
            plain.append(name)

    return plain, media


def _is_media(kind: Any) -> bool:
    """Whether a column holds images or sound, or lists of them, as `datasets` stores them."""
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    if not pyarrow.types.is_struct(kind):
        return False

    return {part.name for part in kind} == {"bytes", "path"}


def _stored(cells: Any, row: int) -> Stored | list[Stored] | None:
    """What a cell of images or sound holds; None for an empty one."""
    cell = cells[row]
    if not cell.is_valid:
        return None
    if hasattr(cell, "keys"):
        return Stored(cells, row)

    return [Stored(cells, row, number) for number in range(len(cell))]
