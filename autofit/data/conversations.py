"""How public data sets write a chat, or a prompt with what completes it: each shape becomes
`messages`, or `prompt` and `completion`.

A shape is known by its columns. Alpaca's rows get the prompt of its own training script, so that a
model tuned on them answers that prompt; with LLaMA-Factory's `history` or `system` they are a chat,
as they are there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import InputError, shown

MESSAGES, COMPLETION, TEXT = ("messages",), ("prompt", "completion"), ("text",)
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
# what a question may need
_CONTEXT = ("system", "history", "context", "passage", "choices", "options")
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
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """One way of writing rows of a form."""

    form: tuple[str, ...]
    columns: tuple[str, ...]  # that a row must have
    read: Callable[[Row, str], dict[str, Any]]  # a row and its location -> the fields of the form
    beside: tuple[str, ...] = ()  # columns that are read where they are
    refused: tuple[str, ...] = ()  # columns that the row needs, and that are not read
    # whether a row is of this shape, given its columns
    shows: Callable[[Row], bool] = lambda row: True
    note: str = ""

    def has_columns(self, row: Row) -> bool:
        """Whether a row has all that this shape needs."""
        return all(row.get(name) is not None for name in self.columns)

    def lost(self, row: Row) -> list[str]:
        """The columns of a row that hold something, and without which it would say something else."""
        return [name for name in self.refused if row.get(name) and name not in self.beside]


def shape_of(row: Any, before: Shape | None = None) -> Shape | None:
    """The most specific shape of a row; None where there is none.

    With the shape of the rows before it, that one where the columns allow, else another of its form.
    """
    if not isinstance(row, Mapping):
        return None
    if before is not None and before.has_columns(row):
        return before

    for shape in SHAPES:
        if not shape.has_columns(row):
            continue
        if before is not None and shape.form == before.form:
            return shape
        is_better_as_text = row.get("text") is not None and bool(shape.lost(row))
        if before is None and shape.shows(row) and not is_better_as_text:
            return shape
    return None


def read_shape(shape: Shape, row: Row, location: str) -> dict[str, Any]:
    """The fields of a row of that shape."""
    if lost := shape.lost(row):
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
    """The messages of ShareGPT's `conversations`: turns with `from` and `value`, or `role` and `content`."""
    if not isinstance(turns, list) or not turns:
        raise InputError(
            f"{location}: conversations must be a list of at least one turn.", _EXAMPLE
        )
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise InputError(
                f"{location}: every turn must be an object, not {type(turn).__name__}.", _EXAMPLE
            )
        message = dict(turn)
        speaker = message.pop("from", None)
        value = message.pop("value", None)
        role = message.get("role")
        if speaker is not None:
            if not isinstance(speaker, str) or speaker not in _ROLES:
                unknown = f"{location}: a turn is from {shown(speaker)}, which is no known role."
                remedy = f"Known are {', '.join(_ROLES)}; calls of tools are given in messages, as tool_calls."
                raise InputError(unknown, remedy)
            role = _ROLES[speaker]
        elif isinstance(role, str):
            role = _ROLES.get(role, role)
        content = message.get("content")
        messages.append({**message, "role": role, "content": value if content is None else content})
    return messages


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
        is_list = isinstance(messages, list) and bool(messages)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            given = type(messages).__name__
            wrong = (
                f"{location}: {name} must be a list of messages beside one that is, not {given}."
            )
            raise InputError(wrong, _EXAMPLE)
    asked = [{**message, "weight": 0} for message in row["prompt"]]
    return {"messages": [*asked, *row["completion"]]}


def _pair(prompt: str, completion: str) -> Shape:
    """A shape of two columns under other names than prompt and completion."""

    def read(row: Row, location: str) -> dict[str, Any]:
        return {"prompt": row[prompt], "completion": row[completion]}

    note = (
        f"{prompt} and {completion} are read as prompt and completion, with nothing between them."
    )
    columns = (prompt, completion)
    return Shape(COMPLETION, columns, read, refused=_CONTEXT, note=note)


def _alpaca(answer: str, context: str) -> Shape:
    """Alpaca's shape; Dolly has the same under other names."""

    def read(row: Row, location: str) -> dict[str, Any]:
        instruction = _text(row, "instruction", location)
        added = _text(row, context, location)
        template = _ALPACA_WITH_INPUT if added else _ALPACA
        prompt = template.format(instruction=instruction, input=added)
        return {"prompt": prompt, "completion": row[answer]}

    columns = ("instruction", answer)
    return Shape(
        COMPLETION,
        columns,
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
    messages = []
    if not isinstance(history, list):
        raise InputError(
            f"{location}: history must be a list, not {type(history).__name__}.", remedy
        )
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            raise InputError(
                f"{location}: every turn of history must be a list of two texts.", remedy
            )
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})

    asked = _text(row, "instruction", location)
    if added := _text(row, "input", location):
        asked = f"{asked}\n{added}"
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": row["output"]})
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
    if isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        if messages[0].get("content") == system:
            return messages
        message = f"{location} has a column system, and its messages begin with another message of the system."
        raise InputError(message, "Leave out one of them.")
    return [{"role": "system", "content": system}, *messages]


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
_OTHER_COLUMNS = (*PREFERENCES, *TEXT, *_CONTEXT, "label")  # which may hold what is to be learnt
SHAPE_COLUMNS = frozenset(_OTHER_COLUMNS).union(*(shape.columns + shape.beside for shape in SHAPES))
