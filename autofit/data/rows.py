"""Rows from a file or a directory: JSON lines, a JSON list, CSV, plain text, or what `Dataset.save_to_disk` wrote.

Python's json and csv read the files, not `datasets.load_dataset`: that one guesses types (the text "007" becomes 7.0,
"NA" null, a date a timestamp), shifts CSV rows that are too long by a column, and its errors lose the line.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import datasets

from autofit.core.errors import InputError, is_whole, printable, reported, sentence, shown
from autofit.core.files import read_text

TEXT, COMPLETION, MESSAGES, LABELLED = ("text",), ("prompt", "completion"), ("messages",), ("text", "label")
PAIR, TWINS, TAGGED = ("source", "target"), ("anchor", "positive"), ("tokens", "tags")
ANSWERS = ("question", "context", "answers")
Form = tuple[str, ...]  # the fields that every row has
_NAMES = {  # what a field may be called, the first before the next: as in public data sets
    "source": ("source", "prompt", "text", "document", "article", "dialogue"),
    "target": ("target", "completion", "summary", "highlights"),
    "anchor": ("anchor", "query", "question"),
    "positive": ("positive", "answer", "passage", "document"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "image": ("image", "images", "file_name"),
    "audio": ("audio", "file_name"),
    "transcript": ("text", "sentence", "transcription", "transcript"),
}
_ROLES = {"human": "user", "gpt": "assistant"}  # LLaVA's words
_Located = Iterable[tuple[str, Any]]  # rows before they are checked, each with its location


@dataclass(frozen=True)
class Rows:
    """Checked rows of one form: a list per field, and the location of each row ("FILE, line 3")."""

    form: Form
    columns: Mapping[str, list[Any]]
    locations: Sequence[str]


@dataclass(frozen=True)
class Stored:
    """An image or sound within a saved data set, read when it is needed."""

    cells: Any  # of its column, as Arrow has them
    row: int
    number: int | None = None  # among those of the row

    def source(self) -> str | BinaryIO:
        """Its bytes, or the file that the data set names."""
        cell = self.cells[self.row]
        value = (cell if self.number is None else cell[self.number]).as_py()
        return str(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"])

    def __str__(self) -> str:
        return f"number {(self.number or 0) + 1}"


def read_rows(path: Path, forms: Sequence[Form], *, by_line: bool = False) -> Rows:
    """Read rows of the first of `forms` that fits the first row; `by_line`: every line of a plain text is one."""
    rows, remedy = _read(path, forms, by_line)
    form: Form | None = None
    columns: dict[str, list[Any]] = {}
    locations = []
    for location, row in rows:
        if form is None:
            form = next((form for form in forms if not _missing(row, form)), None)
            if form is None:
                others = " or ".join(" and ".join(form) for form in forms[1:])
                instead = f" (or {others})" if others else ""
                raise InputError(f"{location} lacks {' and '.join(_missing(row, forms[0]))}{instead}.", remedy)
            columns = {name: [] for name in form}
        if missing := _missing(row, form):
            raise InputError(f"{location} lacks {' and '.join(missing)}.", remedy)
        for name in form:
            columns[name].append(_checked(_value(row, name), name, location))
        locations.append(printable(location))
    if form is None:
        raise InputError(f"the data in {path} is empty.", "Give at least one row.")
    return Rows(form, columns, locations)


def named_file(name: Any, folder: Path, location: str, what: str) -> str | Stored:
    """A file that a row names, relative to the folder of the data, or what is stored in its place."""
    if isinstance(name, Stored):
        return name
    remedy = "Give its path, relative to the data file."
    if not isinstance(name, str) or "://" in name:
        raise InputError(f"{location}: the {what} must be named by its file, not {shown(name)}.", remedy)
    file = folder / name
    if not file.is_file():
        raise InputError(f"{location}: the {what} {file} is not there.", remedy)
    return str(file)


def _read(path: Path, forms: Sequence[Form], by_line: bool) -> tuple[_Located, str]:
    """The rows, and what to do where a field is missing."""
    if path.is_dir():
        return _saved_data_set(path, forms)
    with reported(lambda error: f"the data file {path} cannot be read as text: {error}.", "Give UTF-8 text."):
        text = read_text(path, encoding="utf-8-sig")  # without the byte order mark that some programs write
    if not text.strip():
        raise InputError(f"the data file {path} is empty.")
    kind = path.suffix.lower()
    if kind == ".csv":
        return _csv(path, text)
    if kind != ".jsonl" and TEXT in forms and not by_line:
        return [(str(path), {"text": text})], ""
    if kind == ".json" and text.lstrip().startswith("["):
        rows = enumerate(_json(text, str(path)), start=1)
        return ((f"{path}, row {number}", row) for number, row in rows), "Every row needs them."
    lines = ((f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip())
    if kind == ".jsonl" or TEXT not in forms:
        return ((location, _json(line, location)) for location, line in lines), "Every line needs them."
    return ((location, {"text": line}) for location, line in lines), ""


def _json(line: str, location: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        reason = getattr(error, "msg", sentence(error))
        raise InputError(f"{location} is not JSON: {reason}.", "Give one object a line.") from error


def _csv(path: Path, text: str) -> tuple[_Located, str]:
    """Rows under a header; labels that are whole numbers become numbers."""
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

    return rows(), f"The first line must name the columns; it names {names}."


def _number_or_name(cell: str | None) -> str | int | float | None:
    if cell and re.fullmatch(r"-?[0-9]{1,18}", cell):
        return int(cell)
    if cell and re.fullmatch(r"-?[0-9]*\.[0-9]+(e-?[0-9]+)?", cell, re.IGNORECASE):
        return float(cell)
    return cell or None  # an empty cell is none


def _saved_data_set(path: Path, forms: Sequence[Form]) -> tuple[_Located, str]:
    """What `save_to_disk` wrote; of several splits `train`."""
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        message = f"the directory {path} is none that Dataset.save_to_disk wrote."
        raise InputError(message, "Give a file, or save it with the datasets library.")
    with reported(lambda error: f"the data set in {path} cannot be loaded: {sentence(error)}.", "Save it again."):
        data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            message = f"the data set in {path} has no split named train, but {', '.join(data) or 'none at all'}."
            raise InputError(message, "Give the directory of one of them.")
        data = data["train"]
    fields, names = {name for form in forms for field in form for name in _names(field)}, data.column_names
    data = data.with_format(None).select_columns([name for name in names if name in fields])
    media = {name: data.data.column(name) for name, feature in data.features.items() if _media(feature)}
    plain = data.remove_columns(list(media))

    def rows() -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(plain if plain.column_names else ({} for _ in range(len(data)))):
            stored = {name: _stored(cells, number) for name, cells in media.items()}
            yield f"{path}, row {number + 1}", {**row, **stored}

    return rows(), f"Its columns are {', '.join(names) or 'none'}."


def _media(feature: Any) -> bool:
    """Whether a column holds images or sound, or a list of them in each row."""
    return isinstance(getattr(feature, "feature", feature), datasets.Image | datasets.Audio)


def _stored(cells: Any, row: int) -> Stored | list[Stored] | None:
    cell = cells[row]
    if not cell.is_valid:
        return None
    return Stored(cells, row) if hasattr(cell, "keys") else [Stored(cells, row, number) for number in range(len(cell))]


def _missing(row: Any, form: Form) -> list[str]:
    absent = [name for name in form if not isinstance(row, Mapping) or _value(row, name) is None]
    return [" or ".join(_names(name)) for name in absent]


def _names(field: str) -> tuple[str, ...]:
    return _NAMES.get(field, (field,))


def _value(row: Mapping[str, Any], field: str) -> Any:
    return next((row[name] for name in _names(field) if row.get(name) is not None), None)


def _checked(value: Any, name: str, location: str) -> Any:
    """The checked value; messages become JSON, because their keys differ from row to row."""
    if name in ("label", "image", "audio"):
        return value
    if name == "answers":
        return _checked_answers(value, location)
    if name in TAGGED:
        if not isinstance(value, list):
            message = f"{location}: {name} must be a list with an entry for each word, not {type(value).__name__}."
            raise InputError(message, 'For example {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.')
        return value if name == "tags" else [_checked(word, "a word of tokens", location) for word in value]
    if name == "messages":
        return _checked_messages(value, location)
    if name == "conversations":
        turns = value if isinstance(value, list) else []
        return _checked_messages([_message(turn) for turn in turns if isinstance(turn, Mapping)], location)
    if not isinstance(value, str):
        given = type(value).__name__
        raise InputError(f"{location}: {name} must be text, not {given}.", "Put it in quotation marks.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{location}: {name} holds half of a surrogate pair, which is no character."
        raise InputError(message, "Correct the escape sequence.") from error
    return value


def _checked_answers(value: Any, location: str) -> dict[str, list[Any]]:
    """SQuAD's form of answers: their texts, and where in the context each begins; both empty where there is none."""
    found = value if isinstance(value, Mapping) else {}
    texts, starts = ([each] if (each := found.get(key)) is None else each for key in ("text", "answer_start"))
    fine = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    if not fine or not all(isinstance(text, str) for text in texts) or not all(is_whole(each, 0) for each in starts):
        message = f"{location}: answers must be texts, and as many characters of the context at which each begins."
        raise InputError(message, 'For example {"text": ["Oslo"], "answer_start": [17]}.')
    return {"text": texts, "answer_start": starts}


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """LLaVA's form of a message in that of chat templates."""
    return {"role": _ROLES.get(turn.get("from", ""), turn.get("from")), "content": turn.get("value")}


def _checked_messages(messages: Any, location: str) -> str:
    remedy = 'For example [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}].'
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{location}: messages must be a list of at least one message.", remedy)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{location}: every message must be an object with a role.", remedy)
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(f"{location}: the message of {message['role']} has no content.", remedy)
    # A saved data set fills in the keys that only some messages have.
    filled = [{key: part for key, part in each.items() if key == "content" or part is not None} for each in messages]
    return str(_checked(json.dumps(filled, ensure_ascii=False, default=str), "a message", location))
