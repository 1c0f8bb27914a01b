"""Tokenisation: rows become token ids and, where not every token is learnt, labels.

Processes that do this import neither torch nor the datasets library.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autofit.core.errors import InputError, sentence, shown
from autofit.core.workload import LEARNT
from autofit.data import chat
from autofit.data.byte_tokenizer import byte_ids, is_byte_tokenizer
from autofit.data.failures import failing_as
from autofit.data.framed_tokens import are_longer, framed_ids
from autofit.data.options import IGNORED_LABEL
from autofit.data.row_source import Piece
from autofit.data.rows import (
    ANSWERS,
    COMPLETION,
    JUDGED,
    LABELLED,
    MESSAGES,
    PAIR,
    TAGGED,
    TWINS,
    Rows,
)

ALL = LEARNT[1]
Columns = dict[str, list[Any]]

# Of a tokenizer's call: ids alone, without the tokens that it puts around a text.
_PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}


@dataclass(frozen=True)
class Encoding:
    """How rows become samples.

    Attributes:
        length: that every row is cut to; None where rows are packed.
        masked: some tokens will be hidden, so a text keeps the tokens that the tokenizer puts
            around it ([CLS] ... [SEP]).
    """

    tokenizer: Any
    length: int | None
    learn: str = LEARNT[0]
    masked: bool = False


def encode(rows: Rows, encoding: Encoding) -> Columns:
    """The samples of rows, in columns.

    Returns:
        Of each row its `input_ids`, its `labels` (none where they are the ids) and whether it was
        `cut`; of questions with answers also the `types` of tokens, where the tokenizer has any.
    """
    columns = {**rows.columns, "location": list(rows.locations)}
    if rows.form == MESSAGES:
        columns.setdefault("tools", [""] * len(rows.locations))

    encoders = {
        COMPLETION: _completions,
        MESSAGES: _chats,
        PAIR: _pairs,
        TWINS: _pairs,
        TAGGED: _tagged,
        ANSWERS: _answers,
        JUDGED: _judged,
        LABELLED: _framed,
    }
    encoder = encoders.get(rows.form)
    if encoder is None:
        is_framed = encoding.masked and encoding.length is not None
        encoder = _framed if is_framed else _texts

    return encoder(encoding, columns)


def encode_piece(encoding: Encoding, piece: Piece) -> tuple[Any, list[Any]]:
    """The ids of a piece of a packed text, and the tokens around its ends.

    A token belongs to the piece in which it begins. Two pieces that follow each other are tokenised
    as the whole text is when both see the same tokens around the end that they share.

    Returns:
        The ids; and around the first and the last end a list of (id, where the token begins in
        characters after that end), or None where nothing needs to be compared.
    """
    tokenizer = encoding.tokenizer
    if is_byte_tokenizer(tokenizer):
        return byte_ids(piece.text), [None, None]
    if piece.is_last and not piece.before:
        (ids,) = _plain_ids(tokenizer, [piece.text])
        return ids, [None, None]

    window = piece.before + piece.text + piece.after
    encoded = tokenizer(window, return_offsets_mapping=True, **_PLAIN)
    ids, starts, _ = _with_offsets(encoded["input_ids"], encoded["offset_mapping"])

    first = len(piece.before)
    last = first + len(piece.text)
    ends = []
    for end, beside in ((first, piece.before), (last, piece.after)):
        places = starts - end
        near = abs(places) <= len(beside) // 4
        around = zip(ids[near].tolist(), places[near].tolist(), strict=True)
        ends.append(list(around))

    is_own = (starts >= first) & (starts < last)
    return ids[is_own], ends


def _with_offsets(ids: Any, offsets: Any) -> tuple[Any, Any, Any]:
    """The ids of a text, and the characters at which each token begins and ends."""
    edges = np.array(offsets, np.int64).reshape(-1, 2)
    return np.array(ids, np.int32), edges[:, 0], edges[:, 1]


def end_of_text(tokenizer: Any, ids: Any) -> Any:
    """What is added to a text that ends with these ids."""
    return _unless_ended(_end(tokenizer), ids)


def _texts(encoding: Encoding, rows: Columns) -> Columns:
    """Plain text and the end of text; unless packed, behind the token that the tokenizer begins
    with."""
    start = _start(encoding.tokenizer)
    end = _end(encoding.tokenizer)
    if encoding.length is None:
        start = start[:0]

    samples = []
    for ids in _plain_ids(encoding.tokenizer, rows["text"]):
        whole = np.concatenate([_unless_begun(start, ids), ids, _unless_ended(end, ids)])
        samples.append(whole)

    return _cut(samples, None, encoding.length)


def _completions(encoding: Encoding, rows: Columns) -> Columns:
    """A prompt, which is not learnt, and its completion with the end of text, which is."""
    start = _start(encoding.tokenizer)
    end = _end(encoding.tokenizer)
    prompts, completions = _prompts_and_completions(encoding.tokenizer, rows)

    samples = []
    labels = []
    for prompt, completion in zip(prompts, completions, strict=True):
        begun = prompt
        if not len(prompt):
            begun = completion
        given = np.concatenate([_unless_begun(start, begun), prompt])
        learnt = np.concatenate([completion, _unless_ended(end, completion)])

        sample = np.concatenate([given, learnt])
        samples.append(sample)
        if encoding.learn == ALL:
            labels.append(sample)
        else:
            ignored = np.full(len(given), IGNORED_LABEL)
            labels.append(np.concatenate([ignored, learnt]))

    return _cut(samples, labels, encoding.length)


def _prompts_and_completions(tokenizer: Any, rows: Columns) -> tuple[list[Any], list[Any]]:
    """The ids of prompts, as the model is given them, and of what follows.

    A completion is tokenised behind its prompt, because some tokenizers put a space before every
    text of its own. One whose first token would begin within the prompt is tokenised alone, because
    in use the model gets the prompt alone, too.
    """
    prompts = _plain_ids(tokenizer, rows["prompt"])
    completions = _plain_ids(tokenizer, rows["completion"])
    together = list(map("".join, zip(rows["prompt"], rows["completion"], strict=True)))

    for number, whole in enumerate(_plain_ids(tokenizer, together)):
        prompt = prompts[number]
        begun = whole[: len(prompt)]
        if np.array_equal(begun, prompt):
            completions[number] = whole[len(prompt) :]

    return prompts, completions


def _chats(encoding: Encoding, rows: Columns) -> Columns:
    """Messages in the chat template, of which the assistant's turns are learnt, or all."""
    template = chat.ChatTemplate(encoding.tokenizer)
    learns_all = encoding.learn == ALL
    texts: list[str] = []
    turns: list[chat.Spans] = []
    for given, given_tools, location in zip(
        rows["messages"],
        rows["tools"],
        rows["location"],
        strict=True,
    ):
        messages = json.loads(given)
        tools = json.loads(given_tools) if given_tools else None
        text, spans = _rendered(template, messages, tools, location, learns_all=learns_all)
        texts.append(text)
        turns.append(spans)

    samples = []
    labels = []
    for ids, is_learnt in _ids_within(encoding.tokenizer, texts, turns):
        samples.append(ids)
        labels.append(np.where(is_learnt | learns_all, ids, IGNORED_LABEL))

    return _cut(samples, labels, encoding.length)


def _rendered(
    template: chat.ChatTemplate,
    messages: Any,
    tools: Any,
    location: str,
    *,
    learns_all: bool,
) -> tuple[str, chat.Spans]:
    """The text of a conversation, and the turns in it that are learnt; none where all is.

    Raises:
        InputError: the template does not take the messages, or does not show the turns.
    """
    try:
        if learns_all:
            return template.render(messages, tools), []
        hidden = chat.unlearnt(messages, location)
        return template.render_with_turns(messages, tools, without=hidden)
    except chat.UnlocatedError as error:
        raise chat.unlocated(error, location) from error
    except InputError:
        raise
    except Exception as error:  # a template is code that came with the tokenizer
        message = (
            f"{location}: the tokenizer's chat template does not take these messages: "
            f"{sentence(error)}."
        )
        raise InputError(message, "Correct the messages.") from error


def _ids_within(
    tokenizer: Any,
    texts: list[str],
    spans: list[chat.Spans],
) -> Iterator[tuple[Any, Any]]:
    """The ids of texts without special tokens, and a mask of those within the spans."""
    if is_byte_tokenizer(tokenizer):
        for text, parts in zip(texts, spans, strict=True):
            ids = byte_ids(text)
            # All bytes of a character but its first begin with the bits 10.
            characters = np.cumsum((ids & 0xC0) != 0x80)
            yield ids, _within(parts, characters - 1, characters)

        return

    if tokenizer.is_fast:
        encoded = tokenizer(texts, return_offsets_mapping=True, **_PLAIN)
        columns = zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        for ids, offsets, parts in columns:
            ids, starts, ends = _with_offsets(ids, offsets)
            yield ids, _within(parts, starts, ends)

        return

    # Without offsets, each text is tokenised in pieces, of which every second one is a span.
    for text, parts in zip(texts, spans, strict=True):
        edges = [0]
        for part in parts:
            edges += part
        edges.append(len(text))

        between = [text[start:end] for start, end in pairwise(edges)]
        pieces = _plain_ids(tokenizer, between)
        (ids,) = _plain_ids(tokenizer, [text])
        if not np.array_equal(np.concatenate(pieces), ids):
            # Nobody knows which token a span begins with.
            reason = "this tokenizer does not say which characters a token is of"
            raise chat.unlocated(chat.UnlocatedError(reason))

        masks = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
        yield ids, np.concatenate(masks)


def _within(spans: chat.Spans, starts: Any, ends: Any) -> Any:
    """Which tokens, from each start to its end, have a character in the spans.

    Tokens between two such count, too: some tokenizers say of a space that it has no characters.
    """
    inside = np.zeros(len(starts), bool)
    for start, end in spans:
        tokens = np.flatnonzero((starts < end) & (ends > start))
        if len(tokens):
            inside[tokens[0] : tokens[-1] + 1] = True

    return inside


def _framed(encoding: Encoding, rows: Columns) -> Columns:
    """Text within the tokens that the tokenizer puts around it, which are never masked."""
    length = encoding.length or 0
    texts = _without_empty(rows["text"])
    ids, special, is_cut = framed_ids(encoding.tokenizer, texts, "text", length)
    labels = _none_for(ids)
    if encoding.masked:
        labels = []
        for row, of_row in zip(ids, special, strict=True):
            is_special = np.array(of_row, bool)
            labels.append(np.where(is_special, IGNORED_LABEL, row))

    return {"input_ids": ids, "labels": labels, "cut": is_cut}


def _pairs(encoding: Encoding, rows: Columns) -> Columns:
    """Two texts, each within the tokens that the tokenizer puts around it.

    The second one, as `labels`, is to be written (PAIR), or means the same as the first (TWINS).
    """
    if "target" in rows:
        first, second = PAIR
        argument = "text_target"
    else:
        first, second = TWINS
        argument = "text"

    tokenizer = encoding.tokenizer
    length = encoding.length or 0
    texts = _without_empty(rows[first])
    sources, _, is_source_cut = framed_ids(tokenizer, texts, "text", length)
    targets, _, is_target_cut = framed_ids(tokenizer, rows[second], argument, length)
    is_cut = np.logical_or(is_source_cut, is_target_cut).tolist()
    return {"input_ids": sources, "labels": targets, "cut": is_cut}


def _without_empty(texts: list[str]) -> list[str]:
    """Texts with a space in the place of an empty one: no tokens have no class."""
    return [text or " " for text in texts]


def _tagged(encoding: Encoding, rows: Columns) -> Columns:
    """Words, of which the first token has the number of the word's tag; no other token counts."""
    remedy = (
        'Set "add_prefix_space": true in its tokenizer_config.json where that is what is missing.'
    )
    with _refused_by_tokenizer("words one by one", remedy):
        output = encoding.tokenizer(
            rows["tokens"],
            is_split_into_words=True,
            truncation=True,
            max_length=encoding.length,
            verbose=False,
        )

    labels = []
    is_cut = []
    for number, tags in enumerate(rows["tags"]):
        row = []
        before = None
        last = -1
        for word in output.word_ids(number):
            is_first = word is not None and word != before
            row.append(tags[word] if is_first else IGNORED_LABEL)
            before = word
            if word is not None:
                last = max(last, word)

        labels.append(row)
        is_cut.append(last < len(tags) - 1)

    return {"input_ids": output["input_ids"], "labels": labels, "cut": is_cut}


def _answers(encoding: Encoding, rows: Columns) -> Columns:
    """A question and its context, of which the context is cut.

    Labels are the first and the last token of the answer, twice the first token of all where there
    is no answer, and none where the answer is cut off.
    """
    remedy = "Search with a longer sequence length, or shorten the questions."
    with _refused_by_tokenizer("questions with contexts", remedy):
        output = encoding.tokenizer(
            rows["question"],
            rows["context"],
            return_offsets_mapping=True,
            truncation="only_second",
            max_length=encoding.length,
            verbose=False,
        )

    labels = []
    is_cut = []
    for number, context in enumerate(rows["context"]):
        offsets = output["offset_mapping"][number]
        parts = output.sequence_ids(number)
        spans = {token: offsets[token] for token, part in enumerate(parts) if part == 1}
        seen = max((end for _, end in spans.values()), default=0)
        is_cut.append(seen < len(context.rstrip()))

        answer = _answer_span(rows["answers"][number], context, rows["location"][number])
        tokens = [0, 0]
        if answer is not None:
            tokens = _tokens_of(answer, spans, seen)
        labels.append(tokens)

    return {
        "input_ids": output["input_ids"],
        "labels": labels,
        "cut": is_cut,
        "types": output.get("token_type_ids", _none_for(labels)),
    }


def _answer_span(answers: Any, context: str, location: str) -> chat.Span | None:
    """The first answer's place in the context, in characters; None where there is no answer."""
    if not answers["text"]:
        return None

    text = answers["text"][0]
    start = answers["answer_start"][0]
    stop = start + len(text)
    if context[start:stop] != text:
        message = (
            f"{location}: the answer {shown(text)} is not at character {start} of the context."
        )
        raise InputError(message, "Correct answer_start, which counts characters from 0.")

    return start, stop


def _tokens_of(answer: chat.Span, spans: dict[int, chat.Span], seen: int) -> list[int]:
    """The first and the last token of an answer; nothing where it goes on beyond what is seen."""
    start, stop = answer
    if stop > seen:
        return []

    found = [token for token, (begin, end) in spans.items() if begin < stop and end > start]
    if not found:
        return []
    return [found[0], found[-1]]


def _judged(encoding: Encoding, rows: Columns) -> Columns:
    """A query and a passage in one text, of which the passage is cut."""
    queries = rows["query"]
    passages = rows["passage"]
    if is_byte_tokenizer(encoding.tokenizer):
        texts = list(map("{}\n{}".format, queries, passages))
        return _cut(list(map(byte_ids, texts)), None, encoding.length)

    remedy = "Search with a longer sequence length, or shorten the queries."
    with _refused_by_tokenizer("a query with its passage", remedy):
        output = encoding.tokenizer(
            queries,
            passages,
            truncation="only_second",
            max_length=encoding.length,
            verbose=False,
        )
        whole = encoding.tokenizer(queries, passages, verbose=False)

    none = _none_for(queries)
    return {
        "input_ids": output["input_ids"],
        "labels": none,
        "types": output.get("token_type_ids", none),
        "cut": are_longer(whole["input_ids"], encoding.length or 0),
    }


def _refused_by_tokenizer(what: str, remedy: str) -> AbstractContextManager[None]:
    """Raises InputError for whatever a tokenizer raises inside."""
    return failing_as(f"the tokenizer does not take {what}", remedy)


def _plain_ids(tokenizer: Any, texts: list[str]) -> list[Any]:
    """The ids of texts without special tokens."""
    if is_byte_tokenizer(tokenizer):
        return list(map(byte_ids, texts))

    encoded = tokenizer(texts, **_PLAIN)
    return [np.array(ids, np.int32) for ids in encoded["input_ids"]]


def _unless_begun(start: Any, ids: Any) -> Any:
    """The beginning-of-text token, or nothing where the ids begin with it."""
    if np.array_equal(ids[: len(start)], start):
        return start[:0]
    return start


def _unless_ended(end: Any, ids: Any) -> Any:
    """The end-of-text token, or nothing where the ids end with it."""
    if np.array_equal(ids[len(ids) - len(end) :], end):
        return end[:0]
    return end


def _start(tokenizer: Any) -> Any:
    """The beginning-of-text token as an array; empty unless the tokenizer starts texts with one."""
    first = tokenizer("", verbose=False)["input_ids"][:1]
    if first != [tokenizer.bos_token_id]:
        first = []
    return np.array(first, np.int32)


def _end(tokenizer: Any) -> Any:
    """The end-of-text token as an array; empty where there is none."""
    tokens = []
    if tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    return np.array(tokens, np.int32)


def _cut(ids: list[Any], labels: list[Any] | None, length: int | None) -> Columns:
    """Samples cut to a length; labels are empty where they are the ids."""

    def cut(rows: list[Any]) -> list[Any]:
        return [row[:length].astype(np.int32) for row in rows]

    cut_labels = _none_for(ids)
    if labels:
        cut_labels = cut(labels)
    return {
        "input_ids": cut(ids),
        "labels": cut_labels,
        "cut": are_longer(ids, length),
    }


def _none_for(rows: list[Any]) -> list[Any]:
    """No numbers for each row, as of labels that are the ids."""
    return [[] for _ in rows]
