"""Rows of one form, checked: the fields that a task learns from, out of whatever file holds them."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, as_input_error, is_whole, printable, shown
from autofit.data import preferences
from autofit.data.columnar import Stored, without_nulls
from autofit.data.conversations import COMPLETION as COMPLETION
from autofit.data.conversations import MESSAGES as MESSAGES
from autofit.data.conversations import (
    PREFERENCES,
    SHAPE_COLUMNS,
    Shape,
    of_turns,
    read_shape,
    shape_of,
)
from autofit.data.conversations import TEXT as TEXT
from autofit.data.file_rows import row_sources
from autofit.data.row_source import Block, Piece, RowSource, Wanted

LABELLED = ("text", "label")
JUDGED = ("query", "passage", "label")
PAIR, TWINS, TAGGED = ("source", "target"), ("anchor", "positive"), ("tokens", "tags")
ANSWERS = ("question", "context", "answers")
Form = tuple[str, ...]  # the fields that every row has
_NAMES = {  # what a field may be called, the first before the next: as in public data sets
    "source": ("source", "prompt", "text", "document", "article", "dialogue"),
    "target": ("target", "completion", "summary", "highlights"),
    "anchor": ("anchor", "query", "question"),
    "positive": ("positive", "answer", "passage", "document"),
    "query": ("query", "question", "anchor"),
    "passage": ("passage", "document", "positive", "answer"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "image": ("image", "images", "file_name"),
    "audio": ("audio", "file_name"),
    "transcript": ("text", "sentence", "transcription", "transcript"),
}
_CHATS = ("messages", "conversations")
_MESSAGES_EXAMPLE = 'For example [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}].'


@dataclass(frozen=True)
class Rows:
    """Checked rows of one form: a list per field, and the location of each row ("FILE, line 3").

    Chats have, beside `messages` (the JSON text of a list in each row), `tools`: the JSON text of the row's list of
    tools, or "" where it has none. `notes` say what was read otherwise than one may expect, and what was left out.
    """

    form: Form
    columns: Mapping[str, list[Any]]
    locations: Sequence[str]
    notes: tuple[str, ...] = ()


@dataclass
class Accounts:
    """Which columns were read and which were left out, and what is said of the shapes of rows."""

    read: dict[str, None] = field(default_factory=dict)  # names, in the order of their first use
    left: dict[str, None] = field(default_factory=dict)
    shape_notes: dict[str, None] = field(default_factory=dict)

    def add(self, other: "Accounts") -> None:
        """Count in those of rows that follow."""
        self.read |= other.read
        self.left |= other.left
        self.shape_notes |= other.shape_notes

    def notes(self) -> list[str]:
        """A sentence for each shape that needs one, and for columns that could be learnt but are left out."""
        notes = list(self.shape_notes)
        left = [name for name in self.left if name not in self.read]
        if left:
            notes.append(f"read of each row: {', '.join(self.read)}; left out: {', '.join(left)}.")
        return notes


@dataclass(frozen=True)
class FirstRow:
    """The row that says which form all rows have."""

    forms: Sequence[Form]
    row: Any
    location: str
    remedy: str

    def table(self) -> "Table":
        """A table for rows of its form."""
        shape = shape_of(self.row) if _has_shapes(self.forms) else None
        form = shape.form if shape else None
        if form is None:
            form = _form_of(self.row, self.forms, self.location, self.remedy)
        is_text = not any("image" in form for form in self.forms)
        return Table(form, shape, _known(self.forms), is_text=is_text)


@dataclass(frozen=True)
class Reading:
    """The rows of a file or directory, whose first one is read.

    Attributes:
        blocks: all rows, each with the bytes that are read once they are; to be gone through once.
        notes: gets what is to be said of the files while blocks are read.
    """

    first: FirstRow
    form: Form
    blocks: Iterator[tuple[Block, int]]
    notes: list[str]


def open_preferences(path: Path, *, pairs: bool) -> Reading:
    """Begin to read rows of two answers (`pairs`), or of one that is good or bad, each as two rows of a prompt with an
    answer, as `autofit.data.preferences` says."""
    notes: list[str] = []
    fits = preferences.is_pair if pairs else preferences.is_marked
    wanted = Wanted(preferences.COLUMNS, fits, text=False, by_line=False)
    apart = preferences.pairs_apart if pairs else preferences.marked_apart
    blocks = apart(_blocks(row_sources(path, wanted, notes)))
    return _opened(path, preferences.FORMS, blocks, notes)


def open_rows(path: Path, forms: Sequence[Form], *, by_line: bool = False) -> Reading:
    """Begin to read rows of the most specific of `forms` that fits the first row; `by_line`: every line of a plain
    text is one.

    Where chats and completions are among the forms, all shapes of `autofit.data.conversations` are read.
    """

    def fits(row: Mapping[str, Any]) -> bool:
        if _has_shapes(forms) and shape_of(row) is not None:
            return True
        return any(not _missing(row, form) for form in forms)

    notes: list[str] = []
    wanted = Wanted(frozenset(_known(forms)), fits, TEXT in forms, by_line)
    return _opened(path, forms, _blocks(row_sources(path, wanted, notes)), notes)


def _opened(
    path: Path, forms: Sequence[Form], blocks: Iterator[tuple[Block, int]], notes: list[str]
) -> Reading:
    """The reading of blocks, the first row of which says what form all have."""
    begun = []
    for block, position in blocks:
        begun.append((block, position))
        rows = block.rows
        if isinstance(rows, Piece):
            rows = [(rows.location, {"text": ""})]
        for location, row in rows:
            found = FirstRow(tuple(forms), row, location, block.remedy)
            return Reading(found, found.table().form, itertools.chain(begun, blocks), notes)
    raise InputError(f"the data in {path} is empty.", "Give at least one row.")


def _blocks(sources: Iterable[RowSource]) -> Iterator[tuple[Block, int]]:
    """The blocks of all sources, each with the bytes that are read of all files once it is."""
    done = 0
    for source in sources:
        for block in source.blocks():
            yield block, done + (block.position or 0)
        done += source.size


def read_rows(path: Path, forms: Sequence[Form], *, by_line: bool = False) -> Rows:
    """All rows that `open_rows` begins with, in memory."""
    reading = open_rows(path, forms, by_line=by_line)
    table = reading.first.table()
    text = ""
    for block, _ in reading.blocks:
        if isinstance(block.rows, Piece):
            text += block.rows.text
            if block.rows.is_last:
                table.add({"text": text}, block.rows.location, block)
                text = ""
        else:
            for location, row in block.rows:
                table.add(row, location, block)
    notes = (*reading.notes, *table.accounts.notes())
    return Rows(table.form, table.columns, table.locations, notes)


def _has_shapes(forms: Sequence[Form]) -> bool:
    return MESSAGES in forms and COMPLETION in forms


def _known(forms: Sequence[Form]) -> set[str]:
    """The names of columns that may be read."""
    known = {name for form in forms for field in form for name in _names(field)}
    if _has_shapes(forms):
        known |= SHAPE_COLUMNS
    return known


class Table:
    """Checked rows of a form, one added after the other."""

    def __init__(self, form: Form, shape: Shape | None, known: set[str], *, is_text: bool) -> None:
        self.form = form
        self.shape = shape  # of the first row; None where the form is read by its fields alone
        self.known = known
        self.is_text = is_text
        self.columns: dict[str, list[Any]] = {name: [] for name in form}
        self.desirable: list[int] = []  # of answers that are good or bad
        if shape is not None and form == MESSAGES:
            self.columns["tools"] = []
        self.locations: list[str] = []
        self.accounts = Accounts()

    def add(self, row: Any, location: str, source: Block) -> None:
        """Check a row and keep its fields; an InputError names what is wrong, and where."""
        shape = None
        fields = row
        if self.shape is not None:
            shape = shape_of(row, self.shape)
            if shape is None:
                columns = row if isinstance(row, Mapping) else {}
                missing = [name for name in self.shape.columns if columns.get(name) is None]
                raise InputError(f"{location} lacks {' and '.join(missing)}.", source.remedy)
            fields = read_shape(shape, row, location)
        elif missing := _missing(fields, self.form):
            raise InputError(f"{location} lacks {' and '.join(missing)}.", source.remedy)

        for name in self.form:
            value = _value(fields, name)
            if name in _CHATS:
                turns = of_turns(value, location) if name == "conversations" else value
                checked: Any = _checked_messages(
                    turns, location, source.columnar, is_text=self.is_text
                )
            else:
                checked = _checked(value, name, location)
            self.columns[name].append(checked)
        if "tools" in self.columns:
            self.columns["tools"].append(
                _checked_tools(fields.get("tools"), location, source.columnar)
            )
        self.locations.append(printable(location))
        if preferences.DESIRABLE in row:
            self.desirable.append(row[preferences.DESIRABLE])
        self._account(row, shape)

    def _account(self, row: Mapping[str, Any], shape: Shape | None) -> None:
        """Keep in mind which known columns of a row are read, and which hold something and are not."""
        if shape is None:
            read = [
                next(name for name in _names(field) if row.get(name) is not None)
                for field in self.form
            ]
        else:
            read = [*shape.columns, *(name for name in shape.beside if row.get(name))]
            if shape.note:
                self.accounts.shape_notes[shape.note] = None
        accounts = self.accounts
        accounts.read.update(dict.fromkeys(read))
        for name in row:
            is_left = name in self.known and name not in accounts.read
            if is_left and row[name] not in (None, "", []):
                accounts.left[name] = None


def named_file(name: Any, folder: Path, location: str, what: str) -> str | Stored:
    """A file that a row names, relative to the folder of the data, or what is stored in its place."""
    if isinstance(name, Stored):
        return name
    remedy = "Give its path, relative to the data file."
    if not isinstance(name, str) or "://" in name:
        raise InputError(
            f"{location}: the {what} must be named by its file, not {shown(name)}.", remedy
        )
    file = folder / name
    if not file.is_file():
        raise InputError(f"{location}: the {what} {file} is not there.", remedy)
    return str(file)


def _form_of(row: Any, forms: Sequence[Form], location: str, remedy: str) -> Form:
    """The most specific of the forms that a row fits: a chat before a prompt with its completion, and that before a
    text; an InputError where there is none."""
    fitting = [form for form in forms if not _missing(row, form)]
    for fields in (_CHATS, COMPLETION):
        for form in fitting:
            if any(name in form for name in fields):
                return form
    if fitting:
        return fitting[0]

    if isinstance(row, Mapping) and all(row.get(name) is not None for name in PREFERENCES):
        message = f"{location} holds a preference ({' and '.join(PREFERENCES)}), which this task does not learn."
        raise InputError(
            message, "Search with --task dpo, or give messages, or prompt and completion."
        )
    others = " or ".join(" and ".join(form) for form in forms[1:])
    instead = f" (or {others})" if others else ""
    raise InputError(f"{location} lacks {' and '.join(_missing(row, forms[0]))}{instead}.", remedy)


def _missing(row: Any, form: Form) -> list[str]:
    absent = [name for name in form if not isinstance(row, Mapping) or _value(row, name) is None]
    return [" or ".join(_names(name)) for name in absent]


def _names(field: str) -> tuple[str, ...]:
    return _NAMES.get(field, (field,))


def _value(row: Mapping[str, Any], field: str) -> Any:
    return next((row[name] for name in _names(field) if row.get(name) is not None), None)


def _checked(value: Any, name: str, location: str) -> Any:
    """The checked value of a field that is no chat."""
    if name in ("label", "image", "audio"):
        return value
    if name == "answers":
        return _checked_answers(value, location)
    if name in TAGGED:
        if not isinstance(value, list):
            message = f"{location}: {name} must be a list with an entry for each word, not {type(value).__name__}."
            raise InputError(
                message, 'For example {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.'
            )
        return (
            value
            if name == "tags"
            else [_checked(word, "a word of tokens", location) for word in value]
        )
    if not isinstance(value, str):
        given = type(value).__name__
        raise InputError(
            f"{location}: {name} must be text, not {given}.", "Put it in quotation marks."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{location}: {name} holds half of a surrogate pair, which is no character."
        raise InputError(message, "Correct the escape sequence.") from error
    return value


def _checked_answers(value: Any, location: str) -> dict[str, list[Any]]:
    """SQuAD's form of answers: their texts, and where in the context each begins; both empty where there is none."""
    found = value if isinstance(value, Mapping) else {}
    texts, starts = (
        [each] if (each := found.get(key)) is None else each for key in ("text", "answer_start")
    )
    fine = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    if (
        not fine
        or not all(isinstance(text, str) for text in texts)
        or not all(is_whole(each, 0) for each in starts)
    ):
        message = f"{location}: answers must be texts, and as many characters of the context at which each begins."
        raise InputError(message, 'For example {"text": ["Oslo"], "answer_start": [17]}.')
    return {"text": texts, "answer_start": starts}


def _checked_messages(messages: Any, location: str, columnar: bool, *, is_text: bool) -> str:
    """Messages as JSON, because their keys differ from row to row; for a text model with content in one piece."""
    if not isinstance(messages, list) or not messages:
        message = f"{location}: messages must be a list of at least one message."
        raise InputError(message, _MESSAGES_EXAMPLE)

    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"{location}: every message must be an object with a role.", _MESSAGES_EXAMPLE
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise InputError(
                f"{location}: the message of {message['role']} has no content.", _MESSAGES_EXAMPLE
            )

        # A saved data set fills in the keys that only some messages have.
        filled = {
            key: part for key, part in message.items() if key == "content" or part is not None
        }
        if columnar:
            filled = {key: without_nulls(part) for key, part in filled.items()}
        if is_text and content is not None:
            filled["content"] = _joined(content, message["role"], location)
        checked.append(filled)
    return str(
        _checked(json.dumps(checked, ensure_ascii=False, default=str), "a message", location)
    )


def _joined(content: Any, role: str, location: str) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    example = 'For example "content": "Hello", or [{"type": "text", "text": "Hello"}].'
    if not isinstance(content, list):
        given = type(content).__name__
        raise InputError(f"{location}: the content of {role} must be text, not {given}.", example)

    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            message = (
                f"{location}: the content of {role} has a part of type {shown(kind)}, not text."
            )
            raise InputError(message, "Leave it out, or train a model that takes such parts.")
        if not isinstance(part.get("text"), str):
            raise InputError(
                f"{location}: the content of {role} has a part of type text without text.", example
            )
        texts.append(part["text"])
    return "".join(texts)


def _checked_tools(tools: Any, location: str, columnar: bool) -> str:
    """The tools of a row as JSON, "" where it has none; some data sets have them as JSON already."""
    remedy = 'For example [{"type": "function", "function": {"name": "now", "parameters": {}}}].'
    if isinstance(tools, str):
        with as_input_error(lambda error: f"{location}: tools is text that is not JSON.", remedy):
            tools = json.loads(tools.strip() or "[]")
    if not tools:
        return ""

    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(f"{location}: tools must be a list of objects.", remedy)
    if columnar:
        tools = without_nulls(tools)
    return str(_checked(json.dumps(tools, ensure_ascii=False, default=str), "a tool", location))
