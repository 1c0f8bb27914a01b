"""Preferences as data sets write them: two answers to a prompt, one of them better, or one answer
that is good or bad.

Each row becomes two of `prompt` and `completion`, as text or as messages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autofit.core.errors import InputError, shown
from autofit.data.chat_marks import shared_length
from autofit.data.conversations import COMPLETION, MESSAGES, PREFERENCES, of_turns
from autofit.data.row_source import Block, Blocks, Located, Piece, Row, first_filled

PAIRS = PREFERENCES
# A column of rows that are made here, and of no file: 1 where an answer is good, 0 where it is bad.
DESIRABLE = "\0desirable"
FORMS = (COMPLETION, MESSAGES)  # of rows that are made here

_PROMPTS = ("prompt", "question", "instruction", "query")
_CHATS = ("conversations", "messages")
_ANSWERS = ("completion", "response", "answer", "output")
_MARKS = ("label", "kto_tag")
_TRUE = (True, 1, "true", "True", "1", "good", "desirable")
_FALSE = (False, 0, "false", "False", "0", "bad", "undesirable")
COLUMNS = frozenset(
    (
        *PAIRS,
        *_PROMPTS,
        *_CHATS,
        *_ANSWERS,
        *_MARKS,
        "system",
        "input",
    )
)

_EXAMPLE = 'For example {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}.'
_EXAMPLE_OF_MARKED = 'For example {"prompt": "2 + 2 =", "completion": " 4", "label": true}.'


def is_pair(row: Row) -> bool:
    """Whether a row holds a better and a worse answer."""
    return all(row.get(name) is not None for name in PAIRS)


def is_marked(row: Row) -> bool:
    """Whether a row holds an answer that is said to be good or bad."""
    has_answer = first_filled(row, (*_ANSWERS, *_CHATS)) is not None
    return has_answer and first_filled(row, _MARKS) is not None


def pairs_apart(blocks: Blocks) -> Blocks:
    """Blocks with two rows for each: the prompt with the better answer, then with the worse one."""
    for block, position in blocks:
        rows = []
        for location, row in _rows_of(block):
            prompt, better, worse = read_pair(row, location)
            for answer in (better, worse):
                fields = {"prompt": prompt, "completion": answer}
                rows.append((location, fields))

        yield replace(block, rows=rows), position


class _Marked(NamedTuple):
    """A row with one answer; `is_good`: 1 or 0."""

    location: str
    prompt: Any
    answer: Any
    is_good: int


def marked_apart(blocks: Blocks) -> Blocks:
    """Blocks with two rows for each: the prompt with its answer, then with that of the next row.

    The last row gets the answer of the first one.
    """
    first: _Marked | None = None
    before: _Marked | None = None
    position = 0
    for block, position in blocks:
        rows: list[Located] = []
        for location, row in _rows_of(block):
            found = _Marked(location, *read_marked(row, location))
            if before is not None:
                rows += _with_other(before, found)
            first = first or found
            before = found

        yield replace(block, rows=rows), position

    if first is not None and before is not None:
        yield Block(_with_other(before, first)), position


def _rows_of(block: Block) -> Iterable[Located]:
    """The rows of a block, as a file holds them."""
    assert not isinstance(block.rows, Piece), "no plain text is wanted"
    return block.rows


def _with_other(row: _Marked, other: _Marked) -> list[Located]:
    """A prompt with its own answer, and with that of another row."""
    if isinstance(row.answer, str) != isinstance(other.answer, str):
        message = f"{row.location} and {other.location} hold text and messages."
        raise InputError(message, "Write all rows alike.")

    rows = []
    for answer in (row.answer, other.answer):
        fields = {
            "prompt": row.prompt,
            "completion": answer,
            DESIRABLE: row.is_good,
        }
        rows.append((row.location, fields))

    return rows


def read_pair(row: Any, location: str) -> tuple[Any, Any, Any]:
    """The prompt, the better and the worse answer: texts, or lists of messages.

    Without a column of its own, the prompt is what both answers begin with.
    """
    columns = _columns_of(row)
    missing = [name for name in PAIRS if columns.get(name) is None]
    if missing:
        raise InputError(f"{location} lacks {' and '.join(missing)}.", _EXAMPLE)

    better, worse = [_answer(columns[name], name, location) for name in PAIRS]
    if isinstance(better, str) != isinstance(worse, str):
        message = f"{location}: of {' and '.join(PAIRS)} one is text and the other messages."
        raise InputError(message, "Write both alike.")

    prompt = _prompt(columns, location)
    is_chat = isinstance(better, list) and not isinstance(prompt, list)
    if is_chat and better[0]["role"] in ("system", "user"):  # a prompt beside them is in them, too
        prompt = None

    if prompt is None:
        shared = _shared(better, worse)
        prompt = better[:shared]
        better = better[shared:]
        worse = worse[shared:]
        is_whole = prompt and better and worse
        if isinstance(prompt, list) and not is_whole:
            message = (
                f"{location}: the chosen and the rejected messages share no prompt, or one is no "
                "more."
            )
            raise InputError(message, "Give the prompt in a column of its own.")

    prompt, better = _alike(prompt, better)
    _, worse = _alike(prompt, worse)
    return _with_system(prompt, columns.get("system")), better, worse


def _columns_of(row: Any) -> Row:
    """The columns of a row; none of anything else."""
    if isinstance(row, Mapping):
        return row
    return {}


def read_marked(row: Any, location: str) -> tuple[Any, Any, int]:
    """The prompt, its answer, and 1 where that is good, else 0."""
    columns = _columns_of(row)
    is_good = _mark(columns, location)

    name = first_filled(columns, _ANSWERS)
    if name is not None:
        answer = _answer(columns[name], name, location)
        prompt = _prompt(columns, location)
    else:
        turns: list[Any] = []
        chats = [columns[name] for name in _CHATS if columns.get(name)]
        if chats:
            turns = of_turns(chats[0], location)
        answer = turns[-1:]
        prompt = turns[:-1]

    if not prompt or not answer:
        raise InputError(f"{location} lacks a prompt or its completion.", _EXAMPLE_OF_MARKED)

    prompt, answer = _alike(prompt, answer)
    return _with_system(prompt, columns.get("system")), answer, is_good


def _mark(columns: Row, location: str) -> int:
    """1 where a row's answer is marked good, 0 where it is marked bad."""
    name = first_filled(columns, _MARKS)
    if name is None:
        raise InputError(f"{location} lacks label.", _EXAMPLE_OF_MARKED)

    mark = columns[name]
    if isinstance(mark, bool | int | str):
        if mark in _TRUE:
            return 1
        if mark in _FALSE:
            return 0

    message = f"{location}: label must be true or false, not {shown(mark)}."
    raise InputError(message, _EXAMPLE_OF_MARKED)


def _answer(value: Any, name: str, location: str) -> Any:
    """An answer as text, or as a list of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return of_turns([value], location)
    if isinstance(value, list) and value:
        return of_turns(value, location)

    message = f"{location}: {name} must be text or messages, not {shown(value)}."
    raise InputError(message, _EXAMPLE)


def _prompt(columns: Row, location: str) -> Any:
    """The prompt of a row as text, or as a list of messages; None where it has none."""
    filled = [name for name in (*_PROMPTS, *_CHATS) if columns.get(name)]
    if not filled:
        return None

    name = filled[0]
    prompt = _answer(columns[name], name, location)
    added = columns.get("input")
    if name == "instruction" and isinstance(added, str) and added:
        return f"{prompt}\n{added}"

    return prompt


def _shared(better: Any, worse: Any) -> int:
    """How far two answers are the same, in messages or characters.

    Texts are divided between words: before the last space, or behind another white space.
    """
    shared = shared_length(better, worse)
    if isinstance(better, str):
        while shared and not better[shared - 1].isspace():
            shared -= 1
        if better[:shared].endswith(" "):
            shared -= 1

    return shared


def _alike(prompt: Any, answer: Any) -> tuple[Any, Any]:
    """Both as messages where one of them is."""
    if isinstance(prompt, str) and isinstance(answer, list):
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]

    return prompt, answer


def _with_system(prompt: Any, system: Any) -> Any:
    """A prompt after the system's message, which is a column of its own in some data sets."""
    if not system or not isinstance(system, str):
        return prompt
    if isinstance(prompt, str):
        return f"{system}\n\n{prompt}"
    if prompt and prompt[0].get("role") == "system":
        return prompt

    return [{"role": "system", "content": system}, *prompt]
