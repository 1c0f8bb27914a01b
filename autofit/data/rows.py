"""Checked rows of one form: the fields that a task learns from, whatever file holds them."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, as_input_error, is_whole, printable, shown
from autofit.data import preferences
from autofit.data.columnar import MediaFile, Stored, without_nulls
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
from autofit.data.row_source import Block, Blocks, Piece, Row, RowSource, Wanted, first_filled

Form = tuple[str, ...]  # the fields that every row has
LABELLED = ("text", "label")
JUDGED = ("query", "passage", "label")
PAIR = ("source", "target")
TWINS = ("anchor", "positive")
TAGGED = ("tokens", "tags")
ANSWERS = ("question", "context", "answers")

_COLUMNS = {  # that may hold a field, the first before the next: names that public data sets use
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
_MESSAGES_EXAMPLE = (
    'For example [{"role": "user", "content": "Hello"}, '
    '{"role": "assistant", "content": "Hello!"}].'
)


@dataclass(frozen=True)
class Rows:
    """Checked rows of one form.

    Attributes:
        columns: a list of values for each field. Chats have, beside `messages` (in each row the
            JSON text of a list), `tools`: the JSON text of the row's list of tools, or "".
        locations: of each row, as "FILE, line 3".
        notes: what was left out, or read in another way than one may expect.
    """

    form: Form
    columns: Mapping[str, list[Any]]
    locations: Sequence[str]
    notes: tuple[str, ...] = ()


@dataclass
class Accounts:
    """Which columns were read and which were left out. Keys of the dicts are in order of first use.

    Attributes:
        left: known columns that hold something and were not read in some row.
        shape_notes: sentences on how shapes of rows were read.
    """

    read: dict[str, None] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    shape_notes: dict[str, None] = field(default_factory=dict)

    def add(self, other: "Accounts") -> None:
        """Count in the rows that follow."""
        self.read |= other.read
        self.left |= other.left
        self.shape_notes |= other.shape_notes

    def notes(self) -> list[str]:
        """Notes on shapes, and on columns that could be learnt but were never read."""
        notes = list(self.shape_notes)
        left = [name for name in self.left if name not in self.read]
        if left:
            notes.append(f"read of each row: {', '.join(self.read)}; left out: {', '.join(left)}.")

        return notes


@dataclass(frozen=True)
class FirstRow:
    """The first row of a file, which decides the form of all rows."""

    forms: Sequence[Form]
    row: Any
    location: str
    remedy: str

    def table(self) -> "Table":
        """An empty table for rows of its form."""
        known = _known_columns(self.forms)
        is_text = not any("image" in form for form in self.forms)
        if _has_shapes(self.forms):
            shape = shape_of(self.row)
            if shape is not None:
                return Table(shape.form, shape, known, is_text=is_text)

        form = _form_of(self.row, self.forms, self.location, self.remedy)
        return Table(form, None, known, is_text=is_text)


@dataclass(frozen=True)
class Reading:
    """The rows of a file or directory, of which the first one is read.

    Attributes:
        blocks: all rows, each block with the bytes of the files that are read after it; an iterator
            that can be used once.
        notes: on the files; grows while blocks are read.
    """

    first: FirstRow
    form: Form
    blocks: Blocks
    notes: list[str]


def open_preferences(path: Path, *, pairs: bool) -> Reading:
    """Begin to read rows with a better and a worse answer (`pairs`), or with one answer that is
    marked good or bad.

    Each becomes two rows, as `autofit.data.preferences` says.
    """
    if pairs:
        fits = preferences.is_pair
        in_two = preferences.pairs_apart
    else:
        fits = preferences.is_marked
        in_two = preferences.marked_apart

    notes: list[str] = []
    wanted = Wanted(preferences.COLUMNS, fits, text=False, by_line=False)
    blocks = in_two(_blocks(row_sources(path, wanted, notes)))
    return _opened(path, preferences.FORMS, blocks, notes)


def open_rows(path: Path, forms: Sequence[Form], *, by_line: bool = False) -> Reading:
    """Begin to read rows of that one of `forms` that fits the first row best.

    Where chats and completions are among the forms, all shapes of `autofit.data.conversations` are
    read.

    Args:
        by_line: every line of a plain text is a row; otherwise the whole text is one.
    """

    def fits(row: Row) -> bool:
        if _has_shapes(forms) and shape_of(row) is not None:
            return True
        return any(not _missing(row, form) for form in forms)

    notes: list[str] = []
    wanted = Wanted(frozenset(_known_columns(forms)), fits, TEXT in forms, by_line)
    return _opened(path, forms, _blocks(row_sources(path, wanted, notes)), notes)


def _opened(
    path: Path,
    forms: Sequence[Form],
    blocks: Blocks,
    notes: list[str],
) -> Reading:
    """The reading of blocks up to the first row, which decides the form."""
    begun = []
    for block, position in blocks:
        begun.append((block, position))
        rows = block.rows
        if isinstance(rows, Piece):
            rows = [(rows.location, {"text": ""})]

        for location, row in rows:
            first = FirstRow(tuple(forms), row, location, block.remedy)
            return Reading(first, first.table().form, itertools.chain(begun, blocks), notes)

    raise InputError(f"the data in {path} is empty.", "Give at least one row.")


def _blocks(sources: Iterable[RowSource]) -> Blocks:
    """The blocks of all sources, each with the bytes of all files that are read after it."""
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
        rows = block.rows
        if not isinstance(rows, Piece):
            for location, row in rows:
                table.add(row, location, block)
            continue

        text += rows.text
        if rows.is_last:
            table.add({"text": text}, rows.location, block)
            text = ""

    notes = (*reading.notes, *table.accounts.notes())
    return Rows(table.form, table.columns, table.locations, notes)


def _has_shapes(forms: Sequence[Form]) -> bool:
    """Whether rows may be of any shape of `autofit.data.conversations`."""
    return MESSAGES in forms and COMPLETION in forms


def _known_columns(forms: Sequence[Form]) -> set[str]:
    """The columns that may be read."""
    known: set[str] = set()
    for form in forms:
        for name in form:
            known.update(_columns_of(name))

    if _has_shapes(forms):
        known |= SHAPE_COLUMNS
    return known


class Table:
    """Checked rows of a form, added one after the other."""

    def __init__(
        self,
        form: Form,
        shape: Shape | None,
        known: set[str],
        *,
        is_text: bool,
    ) -> None:
        """
        Args:
            shape: of the first row; None where the form is read by its fields alone.
            known: the columns that could be read.
            is_text: the model takes text alone.
        """
        self.form = form
        self.shape = shape
        self.known = known
        self.is_text = is_text

        self.columns: dict[str, list[Any]] = {name: [] for name in form}
        if shape is not None and form == MESSAGES:
            self.columns["tools"] = []
        self.locations: list[str] = []
        self.desirable: list[int] = []  # 1 or 0 of each answer that is marked good or bad
        self.accounts = Accounts()

    def add(self, row: Any, location: str, source: Block) -> None:
        """Check a row and append its fields.

        Raises:
            InputError: says what is wrong with the row, and where it is.
        """
        shape = None
        fields = row
        if self.shape is None:
            missing = _missing(row, self.form)
        else:
            shape = shape_of(row, self.shape)
            missing = self.shape.missing(row) if shape is None else []

        if missing:
            raise InputError(f"{location} lacks {' and '.join(missing)}.", source.remedy)
        if shape is not None:
            fields = read_shape(shape, row, location)

        for name in self.form:
            value = fields[first_filled(fields, _columns_of(name))]
            if name == "conversations":
                value = of_turns(value, location)
            if name in _CHATS:
                value = _checked_messages(
                    value,
                    location,
                    source.columnar,
                    is_text=self.is_text,
                )
            else:
                value = _checked(value, name, location)

            self.columns[name].append(value)

        if "tools" in self.columns:
            tools = _checked_tools(fields.get("tools"), location, source.columnar)
            self.columns["tools"].append(tools)

        if preferences.DESIRABLE in row:
            self.desirable.append(row[preferences.DESIRABLE])
        self.locations.append(printable(location))
        self._account(row, shape)

    def _account(self, row: Row, shape: Shape | None) -> None:
        """Count which columns of a row were read, and which hold something and were not."""
        accounts = self.accounts
        if shape is None:
            read = [first_filled(row, _columns_of(name)) for name in self.form]
        else:
            read = list(shape.columns)
            read += [name for name in shape.beside if row.get(name)]
            if shape.note:
                accounts.shape_notes[shape.note] = None

        accounts.read |= dict.fromkeys(read)
        for name, value in row.items():
            if name not in self.known or name in accounts.read:
                continue
            if value not in (None, "", []):
                accounts.left[name] = None


def named_file(
    name: Any,
    folder: Path,
    location: str,
    what: str,
) -> MediaFile:
    """The file that a row names, relative to the folder of the data; a stored one stays as it is.

    Args:
        what: the file holds ("image"), for messages.

    Raises:
        InputError: it is no name, or the file is absent.
    """
    if isinstance(name, Stored):
        return name

    remedy = "Give its path, relative to the data file."
    if not isinstance(name, str) or "://" in name:
        message = f"{location}: the {what} must be named by its file, not {shown(name)}."
        raise InputError(message, remedy)

    file = folder / name
    if not file.is_file():
        raise InputError(f"{location}: the {what} {file} is not there.", remedy)
    return str(file)


def _form_of(
    row: Any,
    forms: Sequence[Form],
    location: str,
    remedy: str,
) -> Form:
    """The form of a row: a chat before a prompt with its completion, and that before a text.

    Raises:
        InputError: none of the forms fits.
    """
    fitting = [form for form in forms if not _missing(row, form)]
    for fields in (_CHATS, COMPLETION):
        for form in fitting:
            if any(name in form for name in fields):
                return form

    if fitting:
        return fitting[0]

    if isinstance(row, Mapping) and preferences.is_pair(row):
        columns = " and ".join(PREFERENCES)
        message = f"{location} holds a preference ({columns}), which this task does not learn."
        instead = "Search with --task dpo, or give messages, or prompt and completion."
        raise InputError(message, instead)

    missing = " and ".join(_missing(row, forms[0]))
    if len(forms) > 1:
        others = " or ".join(" and ".join(form) for form in forms[1:])
        missing += f" (or {others})"

    raise InputError(f"{location} lacks {missing}.", remedy)


def _missing(row: Any, form: Form) -> list[str]:
    """The fields that a row lacks, as messages name them."""
    missing = []
    for name in form:
        columns = _columns_of(name)
        if not isinstance(row, Mapping) or first_filled(row, columns) is None:
            missing.append(" or ".join(columns))

    return missing


def _columns_of(name: str) -> tuple[str, ...]:
    """The columns that may hold a field."""
    return _COLUMNS.get(name, (name,))


def _checked(value: Any, name: str, location: str) -> Any:
    """The checked value of a field that is no chat."""
    if name in ("label", "image", "audio"):  # whoever makes batches of them checks them
        return value
    if name == "answers":
        return _checked_answers(value, location)
    if name not in TAGGED:
        return _checked_text(value, name, location)

    if not isinstance(value, list):
        given = type(value).__name__
        message = f"{location}: {name} must be a list with an entry for each word, not {given}."
        raise InputError(message, 'For example {"tokens": ["In", "Oslo"], "tags": ["O", "B-LOC"]}.')

    if name == "tags":
        return value

    return [_checked_text(word, "a word of tokens", location) for word in value]


def _checked_text(value: Any, name: str, location: str) -> str:
    """A text that can be encoded as UTF-8."""
    if not isinstance(value, str):
        message = f"{location}: {name} must be text, not {type(value).__name__}."
        raise InputError(message, "Put it in quotation marks.")

    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{location}: {name} holds half of a surrogate pair, which is no character."
        raise InputError(message, "Correct the escape sequence.") from error

    return value


def _checked_answers(value: Any, location: str) -> dict[str, list[Any]]:
    """SQuAD's form of answers: their texts, and the character of the context at which each begins.

    Both are empty where the context does not answer the question.
    """
    answers = value if isinstance(value, Mapping) else {}
    texts: Any = answers.get("text")
    starts: Any = answers.get("answer_start")
    is_fine = (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(text, str) for text in texts)
        and all(is_whole(start, 0) for start in starts)
    )
    if not is_fine:
        message = (
            f"{location}: answers must be texts, and as many characters of the context "
            "at which each begins."
        )
        raise InputError(message, 'For example {"text": ["Oslo"], "answer_start": [17]}.')

    return {"text": texts, "answer_start": starts}


def _checked_messages(
    messages: Any,
    location: str,
    columnar: bool,
    *,
    is_text: bool,
) -> str:
    """Messages as JSON, because their keys differ from row to row.

    Args:
        columnar: Arrow filled in null for keys that only other rows have.
        is_text: the model takes text alone, so contents in parts are joined.
    """
    if not isinstance(messages, list) or not messages:
        problem = f"{location}: messages must be a list of at least one message."
        raise InputError(problem, _MESSAGES_EXAMPLE)

    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problem = f"{location}: every message must be an object with a role."
            raise InputError(problem, _MESSAGES_EXAMPLE)

        role = message["role"]
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            problem = f"{location}: the message of {role} has no content."
            raise InputError(problem, _MESSAGES_EXAMPLE)

        filled = {}
        for key, part in message.items():
            if part is None and key != "content":
                continue
            filled[key] = without_nulls(part) if columnar else part

        if is_text and content is not None:
            filled["content"] = _joined(content, role, location)
        checked.append(filled)

    return _json_text(checked, "a message", location)


def _joined(content: Any, role: str, location: str) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content

    example = 'For example "content": "Hello", or [{"type": "text", "text": "Hello"}].'
    where = f"{location}: the content of {role}"
    if not isinstance(content, list):
        raise InputError(f"{where} must be text, not {type(content).__name__}.", example)

    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            message = f"{where} has a part of type {shown(kind)}, not text."
            raise InputError(message, "Leave it out, or train a model that takes such parts.")

        text = part.get("text")
        if not isinstance(text, str):
            raise InputError(f"{where} has a part of type text without text.", example)
        texts.append(text)

    return "".join(texts)


def _checked_tools(tools: Any, location: str, columnar: bool) -> str:
    """The tools of a row as JSON, "" where it has none; some data sets hold JSON already."""
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

    return _json_text(tools, "a tool", location)


def _json_text(value: Any, name: str, location: str) -> str:
    """A value as JSON text, checked as any other text is."""
    return _checked_text(json.dumps(value, ensure_ascii=False, default=str), name, location)
