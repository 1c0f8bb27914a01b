"""Chats: the text that a chat template makes of messages, and what of it the assistant wrote.

Generation marks in the template say it. Most templates have none, and cannot be rendered turn by
turn: they strip old reasoning, trim, move system messages, write a date. So a conversation is
rendered twice as a whole, the second time with private characters around each text of each message.
Without these characters both renderings must be the same; with them, every message is found. What a
template writes around a turn of the assistant, its header and its end, is found on a small
conversation, once for each template. A turn is what the model writes itself: it begins where the
generation prompt ends, and ends with what closes it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from autofit.core.errors import InputError, shown
from autofit.data.chat_marks import (
    MARK,
    MOST_TEXTS,
    Message,
    Messages,
    Text,
    count_outside,
    marked,
    shared_length,
    texts_of,
)

Span = tuple[int, int]  # of characters, the end excluded
Spans = list[Span]

ASSISTANT = "assistant"
_KEYS = (
    "weight",
    "train",
    "training",
)  # OpenAI's and axolotl's: whether a message is learnt

# What a template is tried on.
_CALL_ID = "call00001"  # Mistral's templates want nine letters or digits
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = {"role": ASSISTANT, "content": "answer"}
_REASONED = {"role": ASSISTANT, "content": "<think>\nreason\n</think>\n\nanswer"}
_CALL = {
    "type": "function",
    "id": _CALL_ID,
    "function": {"name": "tool", "arguments": {"key": "value"}},
}
_RESULT = {"role": "tool", "name": "tool", "tool_call_id": _CALL_ID, "content": "result"}
_CALLED = (_QUESTION, {"role": ASSISTANT, "tool_calls": [_CALL]}, _RESULT)


class UnlocatedError(Exception):
    """The assistant's turns cannot be told from the rest; the message says why."""


@dataclass(frozen=True)
class _Frame:
    """What a template writes around the assistant's turns.

    Attributes:
        header: stands before each turn, as the generation prompt does; empty where there is none.
        closings: by role, what closes a message after which a turn begins without a header.
        end: closes a turn that others follow.
        last: closes the last turn.
    """

    header: str
    closings: Mapping[str, str]
    end: str
    last: str


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # By template: a tokenizer may have another one for tools.
        self._frames: dict[str, _Frame] = {}
        added = map(str, tokenizer.added_tokens_decoder.values())
        self._tokens = {*added, *tokenizer.all_special_tokens}

    def render(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        template: str | None = None,
        prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            template: the tokenizer's own if None.
            prompt: end with what asks the assistant to answer.
        """
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return str(rendered)

    def render_with_turns(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        without: Collection[int] = (),
    ) -> tuple[str, Spans]:
        """The text of a conversation, and the assistant's turns in it.

        Args:
            without: numbers of messages whose turns are left out.

        Raises:
            UnlocatedError: the template has no generation marks, and it cannot be proven where the
                turns are.
        """
        if not marks_assistant_turns(self._tokenizer, tools):
            text = self.render(messages, tools)
            turns = self._turns(text, messages, tools)
            return text, [turn for number, turn in turns.items() if number not in without]

        text, generated = self._generated(messages, tools)
        if without:
            turns = self._turns(text, messages, tools)
            hidden = [turns[number] for number in without]
            generated = [span for span in generated if not _meets_any(span, hidden)]

        return text, generated

    def end_of_turn(self, tools: Any = None) -> str:
        """What closes the assistant's turns where the template does not mark them; empty where
        nothing does."""
        return self._frame(tools).end

    def shows_tools(self, messages: Messages, tools: Any) -> bool:
        """Whether a conversation is another text with tools; also where it cannot be rendered."""
        try:
            return self.render(messages, tools) != self.render(messages)
        except Exception:  # a template is code that came with the tokenizer
            return True

    def _generated(self, messages: Messages, tools: Any) -> tuple[str, Spans]:
        """The text of a conversation, and what the template marks as generated."""
        conversation = [_without_none(message) for message in messages]
        rendered, generated = render_jinja_template(
            [conversation],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )

        return rendered[0], list(generated[0])

    def _turns(self, text: str, messages: Messages, tools: Any) -> dict[int, Span]:
        """The assistant's turns in the text of a conversation, from after the header to the end, by
        the numbers of their messages.

        Raises:
            UnlocatedError: the template does not show where they are.
        """
        frame = self._frame(tools)
        texts = self._texts(text, messages, tools)
        turns: dict[int, Span] = {}
        done = 0
        headers = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue

            # From the texts before this message's to those after it, there is nothing but what the
            # template writes around the turn, and the turn.
            own, before, after = _around_message(texts, number)
            low = max([done, *(part.end for part in before)])
            high = min([len(text), *(part.start for part in after)])

            first = high
            if own:
                first = own[0].start
            begin = text.find(frame.header, low, first)
            if frame.header and begin >= 0:
                begin += len(frame.header)
                headers += 1
            else:
                previous: Message = {}
                if number:
                    previous = messages[number - 1]
                begin = _after_closing(text, low, previous, frame.closings)

            last = begin
            if own:
                last = own[-1].end
            ends = [frame.end]
            if number == len(messages) - 1:
                ends.insert(0, frame.last)
            done = _after_end(text[:high], last, message, ends)
            turns[number] = (begin, done)

        if frame.header and count_outside(text, texts, frame.header) != headers:
            raise UnlocatedError("it writes the header of the assistant's turns elsewhere, too")
        return turns

    def _texts(self, text: str, messages: Messages, tools: Any) -> list[Text]:
        """The messages' own texts in a rendering, found in a second one with marks around them.

        A mark beside an empty text may change what a template does. Where that is so, empty texts
        get none.
        """
        if MARK.search(text):
            reason = (
                "it writes characters of the last plane for private use, as the messages may hold"
            )
            raise UnlocatedError(reason)

        for with_empty in (True, False):
            conversation, owners = marked(messages, with_empty=with_empty)
            if len(owners) > MOST_TEXTS:
                raise UnlocatedError(f"the messages hold more than {MOST_TEXTS} texts")
            try:
                rendered = self.render(conversation, tools)
            except Exception:  # a template is code that came with the tokenizer
                continue

            if MARK.sub("", rendered) == text:
                return texts_of(rendered, owners)

        reason = (
            "it writes something else when characters without a meaning stand around the messages"
        )
        raise UnlocatedError(reason)

    def _frame(self, tools: Any) -> _Frame:
        """What the template for these tools writes around turns."""
        template = self._tokenizer.get_chat_template(tools=tools)
        if template not in self._frames:
            self._frames[template] = self._find_frame(template)

        return self._frames[template]

    def _find_frame(self, template: str) -> _Frame:
        """What a template writes around turns, found on two questions with their answers."""
        _, to_first, to_question, to_second, _ = self._around(template, [_QUESTION, _ANSWER] * 2)
        asked = self._around(template, [_QUESTION])[-1]
        prompted = self._around(template, [_QUESTION], prompt=True)[-1]
        last = self._around(template, [_QUESTION, _ANSWER])[-1]

        # The header is what the generation prompt and all answers begin with: some prompts begin
        # reasoning, too.
        to_answers = [to_first, to_second]
        reasoned = self._pieces(template, [_QUESTION, _REASONED])
        if reasoned is not None and len(reasoned) > 2:
            to_answers.append(reasoned[2])
        closing = _shared(asked, prompted, self._tokens)
        prompt = prompted.removeprefix(closing)
        header = prompt
        for written in to_answers:
            header = _shared(header, written.removeprefix(closing))

        # The end is what stands between an answer and the next prompt. Without a prompt, an answer
        # must end alike wherever it stands.
        prompted_again = self._pieces(template, [_QUESTION, _ANSWER], prompt=True)
        if prompt and prompted_again is not None and prompted_again[-1].endswith(prompt):
            end = prompted_again[-1].removesuffix(prompt)
        else:
            end = _shared(last, to_question, self._tokens)

        if not to_question.startswith(end):
            raise UnlocatedError("it closes a turn in another way where others follow")

        # Where nothing asks for an answer, a turn begins once the message before it is closed.
        closings = {}
        if not header:
            closings["user"] = closing
        called = self._pieces(template, _CALLED)
        if called is not None and called == self._pieces(template, _CALLED, prompt=True):
            closings["tool"] = called[-1]

        return _Frame(header, closings, end, last)

    def _around(self, template: str, messages: Messages, *, prompt: bool = False) -> list[str]:
        """What a template writes before, between and after the contents of messages."""
        pieces = self._pieces(template, messages, prompt=prompt)
        contents = [message["content"] for message in messages]
        if pieces is None or pieces[1::2] != contents:
            reason = (
                "it does not write each of some questions and answers once, one after the other"
            )
            raise UnlocatedError(reason)

        return pieces[::2]

    def _pieces(
        self,
        template: str,
        messages: Messages,
        *,
        prompt: bool = False,
    ) -> list[str] | None:
        """What a template writes, cut at both ends of each text; None where it takes no such
        messages."""
        conversation, _ = marked(messages)
        try:
            return MARK.split(self.render(conversation, template=template, prompt=prompt))
        except Exception:  # a template is code that came with the tokenizer
            return None


def marks_assistant_turns(tokenizer: Any, tools: Any = None) -> bool:
    """Whether the chat template marks the assistant's tokens (`{% generation %}`)."""
    template = tokenizer.get_chat_template(tools=tools)
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _around_message(
    texts: Sequence[Text],
    number: int,
) -> tuple[Sequence[Text], Sequence[Text], Sequence[Text]]:
    """The texts of a message, those before them and those after them, as they are rendered.

    Raises:
        UnlocatedError: texts of other messages stand within it.
    """
    own = [place for place, text in enumerate(texts) if text.message == number]
    if not own:
        before = [text for text in texts if text.message < number]
        after = [text for text in texts if text.message > number]
        return [], before, after

    start = own[0]
    stop = own[-1] + 1
    if stop - start != len(own):
        raise UnlocatedError("it writes other messages within one of the assistant")
    return texts[start:stop], texts[:start], texts[stop:]


def unlearnt(messages: Messages, location: str) -> set[int]:
    """The numbers of the assistant's messages that are not to be learnt, as their keys say.

    Raises:
        InputError: a key says what cannot be followed.
    """
    found = set()
    for number, message in enumerate(messages):
        is_own = message["role"] == ASSISTANT
        for key in _KEYS:
            value = message.get(key)
            if value is None:
                continue
            if value not in (0, 1):
                problem = (
                    f"{location}: a message has the {key} {shown(value)}, and only 0 and 1 can be "
                    "followed."
                )
                raise InputError(problem, "Give 0 to turns that are not learnt, and 1 to others.")

            if value and not is_own and key != "weight":
                role = message["role"]
                problem = f"{location}: a message of {role} is to be learnt, as its {key} says."
                remedy = f"Leave out its {key}, or learn all tokens with --learn all."
                raise InputError(problem, remedy)

            if is_own and not value:
                found.add(number)

    return found


def unlocated(error: UnlocatedError, location: str = "") -> InputError:
    """The error for users where a chat template does not show which turns are the assistant's."""
    where = f"{location}: " if location else ""
    remedy = (
        "Give a template with {% generation %} marks around them, or learn all tokens with "
        "--learn all."
    )

    return InputError(
        f"{where}the assistant's turns cannot be told from the rest of the chat template: {error}.",
        remedy,
    )


def _after_closing(
    text: str,
    start: int,
    message: Message,
    closings: Mapping[str, str],
) -> int:
    """Where a message ends whose own text ends at `start`, if nothing but its closing follows."""
    closing = closings.get(message.get("role", ""))
    if closing is not None:
        closing = closing.replace(_CALL_ID, str(message.get("tool_call_id")))
        for end in (_blank_end(message) + closing, closing):
            if text.startswith(end, start):
                return start + len(end)

    raise UnlocatedError("a turn of the assistant begins in an unknown way")


def _after_end(
    text: str,
    start: int,
    message: Message,
    ends: Sequence[str],
) -> int:
    """Where a turn ends whose own text ends at `start`: after the first end that follows."""
    content = message.get("content")
    has_text = isinstance(content, str) and bool(content.strip())
    has_more = bool(message.get("tool_calls")) or not has_text
    blank = _blank_end(message)
    for end in ends:
        if has_more and not end.strip():
            continue  # it may stand within what the template writes of the turn

        found = -1
        if text.startswith(blank, start):
            found = text.find(end, start + len(blank))
        if found < 0:
            found = text.find(end, start)
        if found >= 0:
            return found + len(end)

    raise UnlocatedError("a turn of the assistant ends in an unknown way")


def _blank_end(message: Message) -> str:
    """The white space at the end of a message's content, which templates may strip."""
    content = message.get("content")
    if not isinstance(content, str):
        return ""

    return content[len(content.rstrip()) :]


def _shared(text: str, other: str, tokens: Collection[str] = ()) -> str:
    """What two texts begin with, but for the beginning of a token that goes on beyond it."""
    size = shared_length(text, other)
    for token in tokens:
        first = max(0, size - len(token) + 1)
        for start in range(first, size):
            if text.startswith(token, start) or other.startswith(token, start):
                size = min(size, start)

    return text[:size]


def _without_none(message: Message) -> dict[str, Any]:
    """A message without the keys that hold nothing."""
    return {key: part for key, part in message.items() if part is not None}


def _meets_any(span: Span, others: Sequence[Span]) -> bool:
    """Whether a span has a character in common with any other."""
    first, last = span
    return any(first < end and start < last for start, end in others)
