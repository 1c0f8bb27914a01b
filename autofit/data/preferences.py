"""Preferences as data sets write them: two answers to a prompt, one of them better, or one answer that
is good or bad. Each row becomes two of `prompt` and `completion`, as text or as messages.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autofit.core.errors import InputError, shown
from autofit.data.conversations import COMPLETION, MESSAGES, PREFERENCES, of_turns
from autofit.data.row_source import Block, Located, Piece

PAIRS = PREFERENCES
# In rows that are made here: 1 where an answer is good, 0 where it is bad. No file has such a column.
DESIRABLE = "\0desirable"
FORMS = (COMPLETION, MESSAGES)  # that rows have then

_PROMPTS = ("prompt", "question", "instruction", "query")
_CHATS = ("conversations", "messages")
_ANSWERS = ("completion", "response", "answer", "output")
_MARKS = ("label", "kto_tag")
_TRUE = (True, 1, "true", "True", "1", "good", "desirable")
_FALSE = (False, 0, "false", "False", "0", "bad", "undesirable")
COLUMNS = frozenset((*PAIRS, *_PROMPTS, *_CHATS, *_ANSWERS, *_MARKS, "system", "input"))

_EXAMPLE = 'For example {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}.'
_EXAMPLE_OF_MARKED = 'For example {"prompt": "2 + 2 =", "completion": " 4", "label": true}.'

Row = Mapping[str, Any]


def is_pair(row: Row) -> bool:
    """Whether a row holds a better and a worse answer."""
    return all(row.get(name) is not None for name in PAIRS)


def is_marked(row: Row) -> bool:
    """Whether a row holds an answer that is said to be good or bad."""
    has_answer = any(row.get(name) is not None for name in (*_ANSWERS, *_CHATS))
    return has_answer and any(row.get(name) is not None for name in _MARKS)


def pairs_apart(blocks: Iterator[tuple[Block, int]]) -> Iterator[tuple[Block, int]]:
    """Blocks with two rows for each: the prompt with the better answer, then with the worse one."""
    for block, position in blocks:
        rows = []
        for location, row in _rows_of(block):
            prompt, better, worse = read_pair(row, location)
            rows.append((location, _answered(prompt, better)))
            rows.append((location, _answered(prompt, worse)))
        yield replace(block, rows=rows), position


def marked_apart(blocks: Iterator[tuple[Block, int]]) -> Iterator[tuple[Block, int]]:
    """Blocks with two rows for each: the prompt with its answer, then with that of the next row.

    The last row gets the answer of the first one.
    """
    first: tuple[str, Any, Any, int] | None = None
    before: tuple[str, Any, Any, int] | None = None
    position = 0
    for block, position in blocks:
        rows: list[Located] = []
        for location, row in _rows_of(block):
            found = (location, *read_marked(row, location))
            if before is not None:
                rows += _with_other(before, found)
            first = first or found
            before = found
        yield replace(block, rows=rows), position

    if first is not None and before is not None:
        yield Block(_with_other(before, first)), position


def _rows_of(block: Block) -> Iterable[Located]:
    assert not isinstance(block.rows, Piece), "no plain text is wanted"
    return block.rows


def _with_other(row: tuple[str, Any, Any, int], other: tuple[str, Any, Any, int]) -> list[Located]:
    location, prompt, answer, is_good = row
    theirs = other[2]
    if isinstance(answer, str) != isinstance(theirs, str):
        message = f"{location} and {other[0]} hold text and messages."
        raise InputError(message, "Write all rows alike.")
    return [
        (location, {**_answered(prompt, answer), DESIRABLE: is_good}),
        (location, {**_answered(prompt, theirs), DESIRABLE: is_good}),
    ]


def _answered(prompt: Any, answer: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer}


def read_pair(row: Any, location: str) -> tuple[Any, Any, Any]:
    """The prompt, the better and the worse answer: texts, or lists of messages.

    Without a prompt, it is what both begin with.
    """
    columns = row if isinstance(row, Mapping) else {}
    missing = [name for name in PAIRS if columns.get(name) is None]
    if missing:
        raise InputError(f"{location} lacks {' and '.join(missing)}.", _EXAMPLE)

    better, worse = (_answer(columns[name], name, location) for name in PAIRS)
    if isinstance(better, str) != isinstance(worse, str):
        message = f"{location}: of {' and '.join(PAIRS)} one is text and the other messages."
        raise InputError(message, "Write both alike.")

    prompt = _prompt(columns, location)
    is_whole = isinstance(better, list) and not isinstance(prompt, list)
    if is_whole and better[0]["role"] in ("system", "user"):  # a prompt beside them is in them, too
        prompt = None
    if prompt is None:
        shared = _shared(better, worse)
        prompt = better[:shared]
        better = better[shared:]
        worse = worse[shared:]
        if isinstance(prompt, list) and not (prompt and better and worse):
            message = f"{location}: the chosen and the rejected messages share no prompt, or one is no more."
            raise InputError(message, "Give the prompt in a column of its own.")

    prompt, better = _alike(prompt, better)
    _, worse = _alike(prompt, worse)
    return _with_system(prompt, columns.get("system")), better, worse


def read_marked(row: Any, location: str) -> tuple[Any, Any, int]:
    """The prompt, its answer, and 1 where that is good, else 0."""
    columns = row if isinstance(row, Mapping) else {}
    mark = next((columns[name] for name in _MARKS if columns.get(name) is not None), None)
    if isinstance(mark, bool | int | str) and mark in _TRUE:
        is_good = 1
    elif isinstance(mark, bool | int | str) and mark in _FALSE:
        is_good = 0
    else:
        message = f"{location}: label must be true or false, not {shown(mark)}."
        if mark is None:
            message = f"{location} lacks label."
        raise InputError(message, _EXAMPLE_OF_MARKED)

    name = next((name for name in _ANSWERS if columns.get(name) is not None), None)
    if name is not None:
        answer = _answer(columns[name], name, location)
        prompt = _prompt(columns, location)
    else:
        chat = next((columns[name] for name in _CHATS if columns.get(name)), None)
        turns = of_turns(chat, location) if chat else []
        answer, prompt = turns[-1:], turns[:-1]
    if not prompt or not answer:
        raise InputError(f"{location} lacks a prompt or its completion.", _EXAMPLE_OF_MARKED)

    prompt, answer = _alike(prompt, answer)
    return _with_system(prompt, columns.get("system")), answer, is_good


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
    name = next((name for name in (*_PROMPTS, *_CHATS) if columns.get(name)), None)
    if name is None:
        return None

    prompt = _answer(columns[name], name, location)
    added = columns.get("input")
    if name == "instruction" and isinstance(added, str) and added:
        return f"{prompt}\n{added}"
    return prompt


def _shared(better: Any, worse: Any) -> int:
    """How far two answers are the same; of texts, up to a space, with which the rest begins."""
    shared = 0
    for one, other in zip(better, worse, strict=False):
        if one != other:
            break
        shared += 1
    if isinstance(better, str):
        while shared and not better[shared - 1].isspace():
            shared -= 1
        if shared and better[shared - 1] == " ":
            shared -= 1
    return shared


def _alike(prompt: Any, answer: Any) -> tuple[Any, Any]:
    """Both as messages where one of them is."""
    if isinstance(prompt, str) and isinstance(answer, list):
        return [{"role": "user", "content": prompt}], answer
    if isinstance(prompt, list) and isinstance(answer, str):
        return prompt, [{"role": "assistant", "content": answer}]
    return prompt, answer


def _with_system(prompt: Any, system: Any) -> Any:
    if not system or not isinstance(system, str):
        return prompt
    if isinstance(prompt, str):
        return f"{system}\n\n{prompt}"
    if prompt and prompt[0].get("role") == "system":
        return prompt
    return [{"role": "system", "content": system}, *prompt]
