"""Marks around the texts of messages: private characters by which a text is found in what a chat
template writes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]

# Characters for private use, of which texts have none: number k opens text k, or closes it.
_OPENING = 0x100000
_CLOSING = 0x108000
MARK = re.compile("[\U00100000-\U0010fffd]")
MOST_TEXTS = 0x7FFE

# What a message holds that is a text of its own. transformers copies reasoning to the names that
# templates read.
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning", "tool_calls")
_NO_TEXTS = ("id", "type")  # within tool calls


@dataclass(frozen=True)
class Text:
    """Where one text of a message stands in a rendering; empty where the template took one of its
    ends off."""

    message: int
    start: int
    end: int


def marked(messages: Messages, *, with_empty: bool = True) -> tuple[Messages, list[int]]:
    """Messages with marks around each text, and the message of each text."""
    owners: list[int] = []

    def enclosed(value: Any, message: int) -> Any:
        if isinstance(value, Mapping):
            parts = {}
            for key, part in value.items():
                parts[key] = part if key in _NO_TEXTS else enclosed(part, message)
            return parts

        if isinstance(value, list):
            return [enclosed(part, message) for part in value]
        if not isinstance(value, str):
            return value

        inner = value.strip()
        if not inner and not with_empty:
            return value

        # Templates strip texts, so the marks stand within what is left of one.
        start = value.find(inner) if inner else len(value)
        stop = start + len(inner)
        opening = chr(_OPENING + len(owners))
        closing = chr(_CLOSING + len(owners))
        owners.append(message)

        return value[:start] + opening + inner + closing + value[stop:]

    found = []
    for number, message in enumerate(messages):
        texts = {key: enclosed(message[key], number) for key in _TEXTS if key in message}
        found.append({**message, **texts})

    return found, owners


def texts_of(rendered: str, owners: Sequence[int]) -> list[Text]:
    """Where texts of messages stand, in order, in a rendering once its marks are taken out."""
    texts: list[Text] = []
    opened = -1
    for count, mark in enumerate(MARK.finditer(rendered)):
        place = mark.start() - count
        sign = ord(mark.group())
        if sign >= _CLOSING:
            number = sign - _CLOSING
            if number == opened:
                texts[-1] = replace(texts[-1], end=place)
            else:
                texts.append(Text(owners[number], place, place))
            opened = -1
        else:
            opened = sign - _OPENING
            texts.append(Text(owners[opened], place, place))

    return texts


def count_outside(text: str, texts: Sequence[Text], part: str) -> int:
    """How often a part stands in a rendering outside of the texts of messages."""
    count = 0
    done = 0
    for found in texts:
        count += text.count(part, done, found.start)
        done = max(done, found.end)

    return count + text.count(part, done)


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How far two texts, or two lists, are the same from their beginning."""
    length = 0
    for part, its in zip(one, other, strict=False):
        if part != its:
            break
        length += 1

    return length
