"""Rows of text from a file or a directory, in one of a few forms, every row checked and its place known for messages.

Knows JSON lines, CSV, plain text and what `Dataset.save_to_disk` of the datasets library wrote; what the rows become is
left to others.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from autofit.core.errors import InputError

TEXT, COMPLETION, MESSAGES, LABELLED = ("text",), ("prompt", "completion"), ("messages",), ("text", "label")
Form = tuple[str, ...]  # the fields that every row has


@dataclass(frozen=True)
class Rows:
    """Checked rows of one form: a list per field, and where each row stands ("FILE, line 3")."""

    form: Form
    columns: Mapping[str, list[Any]]
    places: Sequence[str]


@dataclass(frozen=True)
class _Source:
    """Rows before they are checked, each with its place, and what to tell when a field is missing."""

    rows: Iterable[tuple[str, Any]]
    remedy: str


def read_rows(path: Path, forms: Sequence[Form], *, by_line: bool = False) -> Rows:
    """Read rows of the first of `forms` that the first row has the fields of.

    Args:
        by_line: every line of a plain text is a row; else all of it is one.

    Raises:
        InputError: not there, empty, nothing that can be read, or a row without the fields or with others in them.
    """
    source = _source(path, forms, by_line)
    form: Form | None = None
    columns: dict[str, list[Any]] = {}
    places = []
    for place, row in source.rows:
        if form is None:
            form = _form(row, forms, place, source.remedy)
            columns = {name: [] for name in form}
        missing = [name for name in form if _lacks(row, name)]
        if missing:
            raise InputError(f"{place} lacks {' and '.join(missing)}.", source.remedy)
        for name in form:
            columns[name].append(_checked(row[name], name, place))
        places.append(place)
    if form is None:
        raise InputError(f"the data in {path} is empty.", "Give at least one row.")
    return Rows(form, columns, places)


def read_text(path: Path) -> str:
    """A file as text, without the byte order mark that some programs write before it.

    Raises:
        InputError: not there, not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise not_there(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the data file {path} cannot be read as text: {error}.", "Give UTF-8 text.") from error
    if not text.strip():
        raise InputError(f"the data file {path} is empty.")
    return text


def not_there(path: Path) -> InputError:
    """The error for a path that does not exist."""
    return InputError(f"the data file {path} is not there.", "Check the path.")


def _source(path: Path, forms: Sequence[Form], by_line: bool) -> _Source:
    if path.is_dir():
        return _saved(path)
    kind = path.suffix.lower()
    if kind == ".csv":
        return _csv(path)
    if kind == ".jsonl" or TEXT not in forms:
        return _Source(_json_lines(path), "Every line needs them.")
    text = read_text(path)
    if not by_line:
        return _Source([(str(path), {"text": text})], "")
    lines = enumerate(text.split("\n"), start=1)
    return _Source([(f"{path}, line {number}", {"text": line}) for number, line in lines if line.strip()], "")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = getattr(error, "msg", "nested too deeply")
                raise InputError(f"{path}, line {number} is not JSON: {reason}.", "Give one object a line.") from error


def _csv(path: Path) -> _Source:
    """Rows under a header; labels that are whole numbers become numbers."""
    text = read_text(path)
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        names = ", ".join(reader.fieldnames or ())
    except csv.Error as error:
        raise InputError(f"{path}, line 1 is not CSV: {error}.", "Correct the line.") from error

    def rows() -> Iterator[tuple[str, Any]]:
        try:
            for row in reader:
                if "label" in row:
                    row["label"] = _number_or_name(row["label"])
                yield f"{path}, line {reader.line_num}", row
        except csv.Error as error:
            message = f"{path}, line {reader.reader.line_num} is not CSV: {error}."
            raise InputError(message, "Correct the line; a field holds 131072 characters at most.") from error

    return _Source(rows(), f"The first line must name the columns; it names {names}.")


def _number_or_name(cell: str | None) -> str | int | float | None:
    if cell and re.fullmatch(r"-?[0-9]+", cell):
        return int(cell)
    if cell and re.fullmatch(r"-?[0-9]*\.[0-9]+(e-?[0-9]+)?", cell, re.IGNORECASE):
        return float(cell)
    return cell or None  # an empty cell is none


def _saved(path: Path) -> _Source:
    """What `save_to_disk` wrote; of several splits `train`."""
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        message = f"the directory {path} is none that Dataset.save_to_disk wrote."
        raise InputError(message, "Give a file, or save it with the datasets library.")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # of files that are none it raises whatever it stumbles over
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"the data set in {path} cannot be loaded: {reason}.", "Save it again.") from error
    if isinstance(saved, datasets.DatasetDict):
        if "train" not in saved:
            message = f"the data set in {path} has no split named train, but {', '.join(saved) or 'none at all'}."
            raise InputError(message, "Give the directory of one of them.")
        saved = saved["train"]
    known = {name for form in (LABELLED, COMPLETION, MESSAGES) for name in form}
    wanted = saved.with_format(None).select_columns([name for name in saved.column_names if name in known])
    rows = ((f"{path}, row {number}", row) for number, row in enumerate(wanted, start=1))
    return _Source(rows, f"Its columns are {', '.join(saved.column_names) or 'none'}.")


def _form(row: Any, forms: Sequence[Form], place: str, remedy: str) -> Form:
    for form in forms:
        if not any(_lacks(row, name) for name in form):
            return form
    first, *others = forms
    missing = " and ".join(name for name in first if _lacks(row, name))
    instead = " or ".join(" and ".join(form) for form in others)
    raise InputError(f"{place} lacks {missing}{f' (or {instead})' if instead else ''}.", remedy)


def _lacks(row: Any, name: str) -> bool:
    return not isinstance(row, Mapping) or row.get(name) is None


def _checked(value: Any, name: str, place: str) -> Any:
    """The value as it is kept: messages as JSON, because what they hold differs from row to row."""
    if name == "label":
        return value
    if name == "messages":
        return _checked_messages(value, place)
    if not isinstance(value, str):
        given = type(value).__name__
        raise InputError(f"{place}: {name} must be text, not {given}.", "Put it in quotation marks.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{place}: {name} holds half of a surrogate pair, which is no character."
        raise InputError(message, "Correct the escape sequence.") from error
    return value


def _checked_messages(value: Any, place: str) -> str:
    remedy = 'For example [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}].'
    if not isinstance(value, list) or not value:
        raise InputError(f"{place}: messages must be a list of at least one message.", remedy)
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{place}: every message must be an object with a role.", remedy)
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(f"{place}: the message of {message['role']} has no content.", remedy)
    # A data set on disk fills up the keys that only some messages have.
    told = [{key: part for key, part in message.items() if key == "content" or part is not None} for message in value]
    return str(_checked(json.dumps(told, ensure_ascii=False, default=str), "a message", place))
