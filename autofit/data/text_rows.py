"""Rows that are written as text: JSON lines, a JSON document, CSV and its like.

Python's json and csv read the files, not `datasets.load_dataset`: that one guesses types (the text
"007" becomes 7.0, "NA" null, a date a timestamp), shifts CSV rows that are too long by a column,
and its errors lose the line.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, sentence
from autofit.data.contents import TextFile, inner_name
from autofit.data.row_source import Located, Piece, RowSource, Wanted

_DELIMITERS = (",", "\t", ";")
_SEEN = 100  # lines that must be rows before a file that is not named so is taken to hold rows
_BEGINNING = 2**10  # characters that show whether a text is JSON
AROUND = 2**12  # characters beside a piece of a text, on each side
_ONE_LINE = re.compile(r"\s*.*\s*")
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w.-]*( [\w.-]+)?")
_LISTS = {  # fields that hold a list in each row
    *("messages", "conversations", "history", "tools", "images"),
    *("tokens", "tags", "ner_tags", "pos_tags", "labels"),
}
_OBJECTS = {"answers", "image", "audio"}  # fields that may hold an object in each row
_NO_JSON = object()


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file, of which each that is not blank is a row: JSON, or a text.

    Attributes:
        first: the number of the first line.
    """

    path: Path
    first: int
    text: str
    is_json: bool

    def __iter__(self) -> Iterator[Located]:
        number = self.first
        start = 0
        while start < len(self.text):  # a list of all lines would be as large as the text
            end = self.text.find("\n", start)
            if end < 0:
                end = len(self.text)

            line = self.text[start:end]
            if line.strip():
                location = f"{self.path}, line {number}"
                yield location, _json(line, location) if self.is_json else {"text": line}

            start = end + 1
            number += 1


def lines_source(file: TextFile, *, is_json: bool = True) -> RowSource:
    """A row in each line that is not blank."""

    def parts() -> Iterator[tuple[Lines, int]]:
        first = 1
        for block, position in file.blocks():
            yield Lines(file.path, first, block, is_json), position
            first += block.count("\n")

    def rows() -> Iterator[Located]:
        for lines, _ in parts():
            yield from lines

    remedy = ""
    if is_json:
        remedy = "Every line needs them."
    return RowSource(rows(), remedy, parts=parts, size=file.size)


def whole_text_source(file: TextFile) -> RowSource:
    """The text of a file as one row."""
    location = str(file.path)

    def rows() -> Iterator[Located]:
        yield location, {"text": file.read()}

    def parts() -> Iterator[tuple[Piece, int]]:
        before = ""
        text = ""
        position = 0
        for part, position in file.parts():
            if text and len(part) >= AROUND:
                yield Piece(location, before, text, part[:AROUND], is_last=False), position
                before = text[-AROUND:]
                text = part
            else:
                text += part

        yield Piece(location, before, text, "", is_last=True), position

    return RowSource(rows(), parts=parts, size=file.size)


def json_source(file: TextFile, wanted: Wanted, notes: list[str]) -> RowSource:
    """The rows of a file that is named as JSON, by what it holds.

    That is rows in lines, a list of rows, an object with such a list, or an object of columns.
    """
    path = file.path
    if _is_lines(file):
        return lines_source(file)

    text = file.read()
    document = _parsed(text)
    is_document = _is_document(path)
    if document is _NO_JSON:
        if is_document and re.match(r"\s*[\[{]", text):
            _json(text, str(path))  # raises
        return lines_source(file)

    rows = _rows_of_document(path, document, wanted, notes)
    if rows is not None:
        return _numbered(path, rows)
    if not is_document and (isinstance(document, list) or _ONE_LINE.fullmatch(text)):
        return lines_source(file)

    return _numbered(path, [document])


def plain_json_source(file: TextFile, wanted: Wanted, notes: list[str]) -> RowSource | None:
    """The rows of a file that is not named as JSON but plainly holds it; None for other text."""
    if not re.match(r'(\[\s*)?\{\s*"', _beginning(file)):
        return None

    if _is_lines(file):
        for line in itertools.islice(_filled_lines(file), _SEEN):
            if not isinstance(_parsed(line), Mapping):
                return None

        return lines_source(file)

    document = _parsed(file.read())
    if document is _NO_JSON:
        return None

    rows = _rows_of_document(file.path, document, wanted, notes)
    if isinstance(document, Mapping):  # which may be of any kind, such as a program's settings
        if rows is None:
            rows = [document]
        if not isinstance(rows[0], Mapping) or not wanted.fits(rows[0]):
            return None

    if rows is None:
        return None
    return _numbered(file.path, rows)


def _beginning(file: TextFile) -> str:
    """The beginning of a text without blanks, with the rest of the part that it is in."""
    begun = ""
    for part, _ in file.parts():
        begun = (begun + part).lstrip()
        if len(begun) > _BEGINNING:
            break

    return begun


def _filled_lines(file: TextFile) -> Iterator[str]:
    """The lines that are not blank."""
    for line in file.lines():
        if line.strip():
            yield line


def _is_lines(file: TextFile) -> bool:
    """Whether the first line is JSON by itself, and others follow."""
    lines = _filled_lines(file)
    first = next(lines, "")

    return next(lines, None) is not None and _parsed(first) is not _NO_JSON


def _is_document(path: Path) -> bool:
    """Whether a file is named as a single JSON document, rather than as lines of JSON."""
    return inner_name(path).suffix.lower() == ".json"


def _numbered(path: Path, rows: Sequence[Any]) -> RowSource:
    """Rows that are known by their numbers."""
    located = ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    return RowSource(located, "Every row needs them.")


def _rows_of_document(
    path: Path,
    document: Any,
    wanted: Wanted,
    notes: list[str],
) -> Sequence[Any] | None:
    """The rows that a JSON document holds; None where it is a row itself, or something else.

    Raises:
        InputError: it holds several lists of rows, and none is named train.
    """
    if isinstance(document, list):
        if _has_rows(document) or _is_document(path):
            return document
        return None
    if not isinstance(document, Mapping):
        return None

    columns = _columns(document)
    if columns:
        rows = []
        for record in zip(*columns.values(), strict=True):
            row = dict(zip(columns, record, strict=True))
            rows.append(row)
        return rows

    if wanted.fits(document):
        return None

    names = [name for name in document if name not in _LISTS and _has_rows(document[name])]
    lists: dict[str, list[Any]] = {name: document[name] for name in names}
    if len(lists) <= 1:
        return next(iter(lists.values()), None)

    several = ", ".join(lists)
    of_train = lists.pop("train", None)
    if of_train is None:
        message = f"{path} holds several lists of rows ({several}), and none is named train."
        raise InputError(message, "Give a file with one of them.")

    left = ", ".join(lists)
    notes.append(f"{path} holds several lists of rows: train is read; left out: {left}.")
    return of_train


def _has_rows(value: Any) -> bool:
    """Whether it is a list that begins with an object."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _columns(document: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """The columns of an object that holds a list of cells for each; None for another object.

    pandas writes an object for each column, with the numbers of the rows as keys.
    """
    columns = {}
    lengths = set()
    first = next(iter(document.values()), None)
    for name, cells in document.items():
        if isinstance(cells, Mapping) and isinstance(first, Mapping):
            if cells.keys() != first.keys() or not all(map(str.isdecimal, cells)):
                return None
            cells = list(cells.values())

        if not isinstance(cells, list) or not cells:
            return None
        if name in _LISTS and not all(isinstance(cell, list | None) for cell in cells):
            return None
        if name not in _OBJECTS and any(isinstance(cell, Mapping) for cell in cells):
            return None

        columns[name] = cells
        lengths.add(len(cells))

    if len(lengths) != 1:
        return None
    return columns


def _parsed(text: str) -> Any:
    """The value of a JSON text; _NO_JSON where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _json(text: str, location: str) -> Any:
    """The value of a JSON text.

    Raises:
        InputError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        reason = sentence(error)
        if isinstance(error, json.JSONDecodeError):
            reason = error.msg
            if "\n" in text:
                reason += f" at line {error.lineno}"
        raise InputError(f"{location} is not JSON: {reason}.", "Give one object a line.") from error


def csv_source(file: TextFile, wanted: Wanted, usual: str) -> RowSource:
    """Rows under a header; labels that are whole numbers become numbers.

    Args:
        usual: the delimiter that the file's suffix stands for. Another one is taken where only that
            makes a header of the wanted columns.
    """
    path = file.path
    delimiter = usual
    for other in (usual, *_DELIMITERS):
        if _fits(_header(file, other), wanted):
            delimiter = other
            break

    reader = csv.DictReader(_with_ends(file), delimiter=delimiter, strict=True)
    try:
        columns = list(reader.fieldnames or ())
    except csv.Error as error:
        raise InputError(f"{path}, line 1 is not CSV: {error}.", "Correct the line.") from error

    for name in columns:
        if columns.count(name) > 1 and name in wanted.names:
            message = f"{path}, line 1 names the column {name} twice."
            raise InputError(message, "Rename one of them.")

    def rows() -> Iterator[Located]:
        try:
            for row in reader:
                location = f"{path}, line {reader.line_num}"
                _check_fields(row, len(columns), location, delimiter)
                if "label" in row:
                    row["label"] = _number_or_name(row["label"])
                yield location, row
        except csv.Error as error:
            message = f"{path}, line {reader.reader.line_num} is not CSV: {error}."
            remedy = "Correct the line; a field holds 131072 characters at most."
            raise InputError(message, remedy) from error

    names = ", ".join(columns)
    return RowSource(rows(), f"The first line must name the columns; it names {names}.")


def _check_fields(
    row: Mapping[Any, Any],
    columns: int,
    location: str,
    delimiter: str,
) -> None:
    """Raise InputError for a row of CSV that its quotation marks, or missing ones, broke."""
    if None in row:  # the key under which csv puts fields without a column
        message = f"{location} has more fields than the {columns} of the first line."
        raise InputError(message, f"Put text that holds {delimiter!r} in quotation marks.")

    if delimiter != "\t":
        return
    for cell in row.values():
        if cell and "\t" in cell and "\n" in cell:
            message = f"{location} ends a field in quotation marks that holds tabs and lines."
            remedy = "Double the quotation marks that are text, or give CSV."
            raise InputError(message, remedy)


def plain_delimiter(file: TextFile, wanted: Wanted) -> str | None:
    """The delimiter of a file that is not named as CSV but plainly is; None for other text.

    Under a header of plain names, wanted ones among them, lines have as many fields as the header.
    """
    for delimiter in _DELIMITERS:
        names = _header(file, delimiter)
        is_plain = len(names) > 1 and all(_COLUMN_NAME.fullmatch(name) for name in names)
        if not is_plain or not _fits(names, wanted):
            continue

        reader = csv.reader(_with_ends(file), delimiter=delimiter, strict=True)
        try:
            records = [record for record in itertools.islice(reader, _SEEN) if record]
        except csv.Error:
            continue

        if len(records) > 1 and all(len(record) == len(names) for record in records):
            return delimiter

    return None


def _with_ends(file: TextFile) -> Iterator[str]:
    """The lines of a text, with their ends."""
    for block, _ in file.blocks():
        yield from io.StringIO(block)


def _header(file: TextFile, delimiter: str) -> list[str]:
    """The fields of the first line that is not empty."""
    line = next(filter(None, file.lines()), "")
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def _fits(names: Sequence[str], wanted: Wanted) -> bool:
    """Whether rows with these columns have the fields that are needed."""
    return wanted.fits(dict.fromkeys(names, "text"))


def _number_or_name(cell: str | None) -> str | int | float | None:
    """The value of a cell; None for an empty one."""
    if not cell:
        return None
    if re.fullmatch(r"-?[0-9]{1,18}", cell):
        return int(cell)
    if re.fullmatch(r"-?[0-9]*\.[0-9]+(e-?[0-9]+)?", cell, re.IGNORECASE):
        return float(cell)

    return cell
