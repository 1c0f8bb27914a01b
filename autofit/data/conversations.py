"""How public data sets write a chat, or a prompt with its completion.

Each shape becomes `messages`, or `prompt` and `completion`. It is known by its columns. Alpaca's
rows get the prompt of Alpaca's own training script, so that a model tuned on them answers that
prompt; with LLaMA-Factory's `history` or `system` they are a chat, as they are there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import InputError, shown
from autofit.data.row_source import Row

MESSAGES = ("messages",)
COMPLETION = ("prompt", "completion")
TEXT = ("text",)

_ROLES = {  # ShareGPT's words, and others that data sets have in their place
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_CONTEXT = (
    "system",
    "history",
    "context",
    "passage",
    "choices",
    "options",
)  # of a question
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_ALPACA_NOTE = (
    "rows of instructions are read with Alpaca's prompt; of each, what completes it is learnt."
)
_EXAMPLE = (
    'For example [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}].'
)


@dataclass(frozen=True)
class Shape:
    """One way of writing rows of a form.

    Attributes:
        columns: that a row must have.
        read: makes the fields of the form from a row and its location.
        beside: columns that are read too where a row has them.
        refused: columns that a row may depend on, and that are not read.
        shows: whether a row that has the columns is of this shape.
        note: says to the user how such rows are read.
    """

    form: tuple[str, ...]
    columns: tuple[str, ...]
    read: Callable[[Row, str], dict[str, Any]]
    beside: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    shows: Callable[[Row], bool] = lambda row: True
    note: str = ""

    def missing(self, row: Any) -> list[str]:
        """The columns that this shape needs and a row lacks."""
        if not isinstance(row, Mapping):
            return list(self.columns)
        return [name for name in self.columns if row.get(name) is None]

    def lost(self, row: Row) -> list[str]:
        """The columns of a row that would be lost, although they may change what it says."""
        return [name for name in self.refused if row.get(name) and name not in self.beside]


def shape_of(row: Any, before: Shape | None = None) -> Shape | None:
    """The most specific shape of a row; None where none fits.

    Args:
        before: the shape of earlier rows, which is kept where the row has its columns; otherwise
            another shape of the same form is looked for.
    """
    if not isinstance(row, Mapping):
        return None
    if before is not None and not before.missing(row):
        return before

    for shape in SHAPES:
        if shape.missing(row):
            continue

        if before is not None:
            if shape.form == before.form:
                return shape
            continue

        is_better_as_text = row.get("text") is not None and bool(shape.lost(row))
        if shape.shows(row) and not is_better_as_text:
            return shape

    return None


def read_shape(shape: Shape, row: Row, location: str) -> dict[str, Any]:
    """The fields of a row of that shape.

    Raises:
        InputError: columns that the row may depend on would not be read.
    """
    lost = shape.lost(row)
    if lost:
        columns = " and ".join(shape.columns)
        message = f"{location} has {' and '.join(lost)} beside {columns}, which would not be read."
        remedy = "Give messages, or a prompt that holds all of it and its completion; in every row."
        raise InputError(message, remedy)

    fields = shape.read(row, location)
    if shape.form == MESSAGES:
        fields["messages"] = _with_system(fields["messages"], row.get("system"), location)
        fields["tools"] = row.get("tools")

    return fields


def of_turns(turns: Any, location: str) -> list[dict[str, Any]]:
    """The messages of ShareGPT's `conversations`: turns with `from` and `value`, or with `role` and
    `content`."""
    if not isinstance(turns, list) or not turns:
        problem = f"{location}: conversations must be a list of at least one turn."
        raise InputError(problem, _EXAMPLE)

    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            problem = f"{location}: every turn must be an object, not {type(turn).__name__}."
            raise InputError(problem, _EXAMPLE)

        message = dict(turn)
        speaker = message.pop("from", None)
        value = message.pop("value", None)
        role = message.get("role")
        if speaker is not None:
            role = _role_of(speaker, location)
        elif isinstance(role, str):
            role = _ROLES.get(role, role)

        message["role"] = role
        if message.get("content") is None:
            message["content"] = value
        messages.append(message)

    return messages


def _role_of(speaker: Any, location: str) -> str:
    """The role of ShareGPT's name of a speaker."""
    if isinstance(speaker, str) and speaker in _ROLES:
        return _ROLES[speaker]

    problem = f"{location}: a turn is from {shown(speaker)}, which is no known role."
    known = ", ".join(_ROLES)
    raise InputError(
        problem, f"Known are {known}; calls of tools are given in messages, as tool_calls."
    )


def _messages(row: Row, location: str) -> dict[str, Any]:
    return {"messages": row["messages"]}


def _conversations(row: Row, location: str) -> dict[str, Any]:
    return {"messages": of_turns(row["conversations"], location)}


def _plain(row: Row, location: str) -> dict[str, Any]:
    return {"prompt": row["prompt"], "completion": row["completion"]}


def _chat_and_answer(row: Row, location: str) -> dict[str, Any]:
    """TRL's conversational prompt and completion, of which only the completion is learnt."""
    for name in COMPLETION:
        messages = row[name]
        are_messages = isinstance(messages, list) and bool(messages)
        if are_messages:
            are_messages = all(isinstance(message, Mapping) for message in messages)
        if not are_messages:
            given = type(messages).__name__
            rule = f"{name} must be a list of messages beside one that is"
            raise InputError(f"{location}: {rule}, not {given}.", _EXAMPLE)

    asked = [{**message, "weight": 0} for message in row["prompt"]]
    return {"messages": asked + list(row["completion"])}


def _pair(prompt: str, completion: str) -> Shape:
    """A shape of two columns with other names than prompt and completion."""

    def read(row: Row, location: str) -> dict[str, Any]:
        return {"prompt": row[prompt], "completion": row[completion]}

    note = (
        f"{prompt} and {completion} are read as prompt and completion, with nothing between them."
    )
    return Shape(COMPLETION, (prompt, completion), read, refused=_CONTEXT, note=note)


def _alpaca(answer: str, context: str) -> Shape:
    """Alpaca's shape; Dolly has the same under other names."""

    def read(row: Row, location: str) -> dict[str, Any]:
        instruction = _text(row, "instruction", location)
        added = _text(row, context, location)
        template = _ALPACA_WITH_INPUT if added else _ALPACA
        prompt = template.format(instruction=instruction, input=added)

        return {"prompt": prompt, "completion": row[answer]}

    return Shape(
        COMPLETION,
        ("instruction", answer),
        read,
        beside=(context,),
        refused=("input", *_CONTEXT),
        note=_ALPACA_NOTE,
    )


def _alpaca_chat(row: Row, location: str) -> dict[str, Any]:
    """LLaMA-Factory's variant of Alpaca: a chat whose earlier turns are in `history`."""
    remedy = (
        'For example "history": [["Hello", "Hello!"]], a question with its answer for each turn.'
    )
    history = row.get("history") or []
    if not isinstance(history, list):
        problem = f"{location}: history must be a list, not {type(history).__name__}."
        raise InputError(problem, remedy)

    turns = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            problem = f"{location}: every turn of history must be a list of two texts."
            raise InputError(problem, remedy)

        turns.append(turn)

    question = _text(row, "instruction", location)
    added = _text(row, "input", location)
    if added:
        question = f"{question}\n{added}"
    turns.append([question, row["output"]])

    messages = []
    for asked, answer in turns:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})

    return {"messages": messages}


def _text(row: Row, name: str, location: str) -> str:
    """The text in a column, "" where there is none."""
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        message = f"{location}: {name} must be text, not {type(text).__name__}."
        raise InputError(message, "Put it in quotation marks.")

    return text or ""


def _with_system(messages: Any, system: Any, location: str) -> Any:
    """Messages after the system's, which is a column of its own in some data sets."""
    if not system or not isinstance(messages, list) or not messages:
        return messages

    first = messages[0]
    if not isinstance(first, Mapping) or first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") == system:
        return messages

    problem = (
        f"{location} has a column system, and its messages begin with another message "
        "of the system."
    )
    raise InputError(problem, "Leave out one of them.")


_BESIDE_CHATS = ("tools", "system")
SHAPES = (  # the more specific before the less
    Shape(MESSAGES, MESSAGES, _messages, beside=_BESIDE_CHATS),
    Shape(MESSAGES, ("conversations",), _conversations, beside=_BESIDE_CHATS),
    Shape(
        MESSAGES,
        COMPLETION,
        _chat_and_answer,
        beside=_BESIDE_CHATS,
        shows=lambda row: any(isinstance(row[name], list) for name in COMPLETION),
    ),
    Shape(
        MESSAGES,
        ("instruction", "output"),
        _alpaca_chat,
        beside=("input", "history", *_BESIDE_CHATS),
        shows=lambda row: "history" in row or "system" in row,
        note="rows of instructions with history or system are read as chats.",
    ),
    Shape(COMPLETION, COMPLETION, _plain),
    _pair("prompt", "response"),
    _alpaca("output", "input"),
    _alpaca("response", "context"),
    _pair("query", "response"),
    _pair("question", "response"),
    _pair("question", "answer"),
    _pair("input", "output"),
)
PREFERENCES = ("chosen", "rejected")
_OTHER_COLUMNS = (
    *PREFERENCES,
    *TEXT,
    *_CONTEXT,
    "label",
)  # which may hold what is to be learnt
SHAPE_COLUMNS = frozenset(_OTHER_COLUMNS).union(*(shape.columns + shape.beside for shape in SHAPES))
