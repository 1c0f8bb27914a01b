"""The rows of a file or a directory, by what it holds.

Its name alone says little of a `.json`, and nothing of a `.txt` that holds JSON lines. Nothing is
learnt as raw text that plainly is something else.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autofit.core.errors import InputError
from autofit.data.columnar import (
    ARROW_FILE,
    ARROW_STREAM,
    PARQUET,
    arrow_source,
    parquet_source,
    saved_source,
)
from autofit.data.contents import (
    HEAD,
    READABLE,
    compression_of,
    decompressed,
    head_of,
    read_parts,
    text_file,
)
from autofit.data.folders import SAVED, kind_of, shards
from autofit.data.row_source import RowSource, Wanted
from autofit.data.text_rows import (
    csv_source,
    json_source,
    lines_source,
    plain_delimiter,
    plain_json_source,
    whole_text_source,
)

_USUAL_DELIMITER = {"CSV": ",", "TSV": "\t"}
_OR_TEXT = " To learn such text as it is, put it into rows with a field named text."


def row_sources(path: Path, wanted: Wanted, notes: list[str]) -> Iterator[RowSource]:
    """The rows of a file, of each file of a directory in turn, or of a saved data set.

    `notes` gets a sentence for all that is read otherwise than its name says, or left out.
    """
    if not path.is_dir():
        yield _of_file(path, wanted, notes)
        return

    if any((path / name).exists() for name in SAVED):
        yield saved_source(path, wanted)
        return

    of_files: list[str] = []
    for file in shards(path, notes):
        yield _of_file(file, wanted, of_files)
    if len(of_files) > 1:
        notes.append(
            f"{of_files[0]} So it is with {len(of_files) - 1} more of the files in {path}."
        )
    else:
        notes += of_files


def _of_file(path: Path, wanted: Wanted, notes: list[str]) -> RowSource:
    """The rows of one file."""
    kind = kind_of(path)
    head = head_of(path)
    if compression_of(head) is not None:
        head = next(read_parts(path, head), (b"", 0))[0][:HEAD]

    if head.startswith(PARQUET):
        return parquet_source(path, decompressed(path, head_of(path)), wanted)
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return arrow_source(path, decompressed(path, head_of(path)), wanted)

    file = text_file(path, head)
    if kind in ("Parquet", "Arrow"):
        raise InputError(
            f"the data file {path} is named as {kind}, and holds something else.", READABLE
        )

    source: RowSource | None
    if kind == "JSON":
        source = json_source(file, wanted, notes)
    else:
        source = plain_json_source(file, wanted, notes)
        if source is not None:
            notes.append(f"{path} holds JSON, and is read as such.")

    if source is not None:
        return replace(source, remedy=source.remedy + (_OR_TEXT if wanted.text else ""))

    if kind in _USUAL_DELIMITER:
        return csv_source(file, wanted, _USUAL_DELIMITER[kind])

    delimiter = plain_delimiter(file, wanted)
    if delimiter is not None:
        notes.append(f"{path} holds rows under a header, and is read as such.")
        return csv_source(file, wanted, delimiter)

    if not wanted.text:
        return lines_source(file)
    if not wanted.by_line:
        return whole_text_source(file)

    return lines_source(file, is_json=False)
