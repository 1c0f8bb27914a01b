"""Tokenisation: rows become token ids and, where not every token is learnt, labels.

Processes that do this import neither torch nor the datasets library.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autofit.core.errors import InputError, as_input_error, sentence, shown
from autofit.core.workload import LEARNT
from autofit.data import chat
from autofit.data.byte_tokenizer import byte_ids, is_byte_tokenizer
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


@dataclass(frozen=True)
class Encoding:
    """How rows become samples."""

    tokenizer: Any
    length: int | None  # to cut every row to; None where rows are packed
    learn: str = LEARNT[0]
    masked: bool = False  # some tokens will be hidden, so a text keeps the tokenizer's own frame ([CLS] ... [SEP])


def encode(rows: Rows, encoding: Encoding) -> Columns:
    """Of each row its `input_ids`, its `labels` (none where they are the ids) and whether it was `cut`; of questions
    with answers also the `types` of tokens, as far as the tokenizer has any."""
    is_framed = rows.form == LABELLED or (encoding.masked and encoding.length is not None)
    encoders = {
        COMPLETION: _completions,
        MESSAGES: _chats,
        PAIR: _pairs,
        TWINS: _pairs,
        TAGGED: _tagged,
        ANSWERS: _answers,
        JUDGED: _judged,
    }
    encoder = encoders.get(rows.form, _framed if is_framed else _texts)
    columns = {**rows.columns, "location": list(rows.locations)}
    if rows.form == MESSAGES:
        columns.setdefault("tools", [""] * len(rows.locations))
    return encoder(encoding, columns)


def encode_piece(encoding: Encoding, piece: Piece) -> tuple[Any, list[Any]]:
    """The ids of a piece of a text that is packed, and what is seen of tokens around its ends, by which it is known
    whether pieces are tokenised as the whole is.

    A token is of the piece in which it begins. Around each end are the ids of tokens, with where they begin.
    """
    tokenizer = encoding.tokenizer
    if is_byte_tokenizer(tokenizer):
        return byte_ids(piece.text), [None, None]
    if piece.is_last and not piece.before:
        return _plain_ids(tokenizer, [piece.text])[0], [None, None]

    window = piece.before + piece.text + piece.after
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(window, return_offsets_mapping=True, **options)
    ids = np.array(encoded["input_ids"], np.int32)
    starts = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]

    first = len(piece.before)
    last = first + len(piece.text)
    ends = []
    for place, beside in (first, piece.before), (last, piece.after):
        near = abs(starts - place) <= len(beside) // 4
        ends.append(list(zip(ids[near].tolist(), (starts[near] - place).tolist(), strict=True)))
    return ids[(starts >= first) & (starts < last)], ends


def end_of_text(tokenizer: Any, ids: Any) -> Any:
    """What is added to a text with these last ids."""
    return _unless_ended(_end(tokenizer), ids)


def _texts(encoding: Encoding, rows: Columns) -> Columns:
    """Plain text followed by the end of text; unless packed, after the token that the tokenizer begins with."""
    start = _start(encoding.tokenizer)
    end = _end(encoding.tokenizer)
    if encoding.length is None:
        start = start[:0]

    texts = _plain_ids(encoding.tokenizer, rows["text"])
    ids = [
        np.concatenate([_unless_begun(start, text), text, _unless_ended(end, text)])
        for text in texts
    ]
    return _cut(ids, None, encoding.length)


def _completions(encoding: Encoding, rows: Columns) -> Columns:
    """A prompt, which is not learnt, and its completion with the end of text, which is."""
    start = _start(encoding.tokenizer)
    end = _end(encoding.tokenizer)
    prompts, completions = _prompts_and_completions(encoding.tokenizer, rows)

    ids, labels = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        begun = prompt if len(prompt) else completion
        given = np.concatenate([_unless_begun(start, begun), prompt])
        learnt = np.concatenate([completion, _unless_ended(end, completion)])
        ids.append(np.concatenate([given, learnt]))
        if encoding.learn == ALL:
            labels.append(ids[-1])
        else:
            labels.append(np.concatenate([np.full(len(given), IGNORED_LABEL), learnt]))
    return _cut(ids, labels, encoding.length)


def _prompts_and_completions(tokenizer: Any, rows: Columns) -> tuple[list[Any], list[Any]]:
    """The ids of prompts, as the model is given them, and of what follows.

    A completion is tokenised behind its prompt, because some tokenizers put a space before every text of its own. One
    whose first token would begin within the prompt is tokenised alone: the prompt is given to the model alone, too.
    """
    prompts = _plain_ids(tokenizer, rows["prompt"])
    together = [
        prompt + completion
        for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True)
    ]
    wholes = _plain_ids(tokenizer, together)
    alone = _plain_ids(tokenizer, rows["completion"])

    completions = []
    for number, prompt in enumerate(prompts):
        follows = np.array_equal(wholes[number][: len(prompt)], prompt)
        completions.append(wholes[number][len(prompt) :] if follows else alone[number])
    return prompts, completions


def _chats(encoding: Encoding, rows: Columns) -> Columns:
    """Messages in the chat template, of which the assistant's turns are learnt, or all."""
    template = chat.ChatTemplate(encoding.tokenizer)
    texts: list[str] = []
    turns: list[list[chat.Span]] = []
    for given, given_tools, location in zip(
        rows["messages"], rows["tools"], rows["location"], strict=True
    ):
        messages = json.loads(given)
        tools = json.loads(given_tools) if given_tools else None
        try:
            if encoding.learn == ALL:
                text = template.render(messages, tools)
                spans: list[chat.Span] = []
            else:
                hidden = chat.unlearnt(messages, location)
                text, spans = template.render_with_turns(messages, tools, without=hidden)
        except chat.UnlocatedError as error:
            raise chat.unlocated(error, location) from error
        except InputError:
            raise
        except Exception as error:  # a template is code that came with the tokenizer
            message = f"{location}: the tokenizer's chat template does not take these messages: {sentence(error)}."
            raise InputError(message, "Correct the messages.") from error
        texts.append(text)
        turns.append(spans)

    ids, labels = [], []
    for tokens, is_learnt in _ids_within(encoding.tokenizer, texts, turns):
        ids.append(tokens)
        labels.append(np.where(is_learnt | (encoding.learn == ALL), tokens, IGNORED_LABEL))
    return _cut(ids, labels, encoding.length)


def _ids_within(
    tokenizer: Any, texts: list[str], spans: list[list[chat.Span]]
) -> Iterator[tuple[Any, Any]]:
    """The ids of texts without special tokens, and which of them have a character in the spans."""
    if is_byte_tokenizer(tokenizer):
        for text, parts in zip(texts, spans, strict=True):
            ids = byte_ids(text)
            # all bytes of a character but its first begin with 10
            characters = np.cumsum((ids & 0xC0) != 0x80)
            yield ids, _within(parts, characters - 1, characters)
        return

    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    if tokenizer.is_fast:
        encoded = tokenizer(texts, return_offsets_mapping=True, **options)
        for number in range(len(texts)):
            offsets = np.array(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
            ids = np.array(encoded["input_ids"][number], np.int32)
            yield ids, _within(spans[number], offsets[:, 0], offsets[:, 1])
        return

    # Without offsets, the tokens of the parts are those of the whole, or it is not known where a part begins.
    for text, parts in zip(texts, spans, strict=True):
        edges = [0, *(edge for part in parts for edge in part), len(text)]
        pieces = [text[start:end] for start, end in pairwise(edges)]
        tokens = _plain_ids(tokenizer, pieces)
        (ids,) = _plain_ids(tokenizer, [text])
        if not np.array_equal(np.concatenate(tokens), ids):
            no_places = chat.UnlocatedError(
                "this tokenizer does not say which characters a token is of"
            )
            raise chat.unlocated(no_places)
        yield (
            ids,
            np.concatenate(
                [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(tokens)]
            ),
        )


def _within(spans: list[chat.Span], starts: Any, ends: Any) -> Any:
    """Which tokens, from each start to its end, have a character in the spans, or stand between such."""
    inside = np.zeros(len(starts), bool)
    for start, end in spans:
        tokens = np.flatnonzero((starts < end) & (ends > start))
        if len(tokens):
            inside[tokens[0] : tokens[-1] + 1] = (
                True  # some tokenizers say of a space that it has no characters
            )
    return inside


def _framed(encoding: Encoding, rows: Columns) -> Columns:
    """Text within the tokens that the tokenizer puts around it, which are never masked."""
    # no tokens have no class
    samples, is_cut = _framed_ids(encoding, "text", [text or " " for text in rows["text"]])
    labels: list[Any] = [[] for _ in samples]
    if encoding.masked:
        labels = [np.where(np.array(special, bool), IGNORED_LABEL, ids) for ids, special in samples]
    return {"input_ids": [ids for ids, _ in samples], "labels": labels, "cut": is_cut}


def _pairs(encoding: Encoding, rows: Columns) -> Columns:
    """Two texts, each within the tokens that the tokenizer puts around it; the second one, as `labels`, is to be
    written, or is of the same kind as the first."""
    (first, second), argument = (PAIR, "text_target") if "target" in rows else (TWINS, "text")
    sources, is_cut = _framed_ids(encoding, "text", [text or " " for text in rows[first]])
    targets, is_cut_too = _framed_ids(encoding, argument, rows[second])
    return {
        "input_ids": [ids for ids, _ in sources],
        "labels": [ids for ids, _ in targets],
        "cut": [any(both) for both in zip(is_cut, is_cut_too, strict=True)],
    }


def _tagged(encoding: Encoding, rows: Columns) -> Columns:
    """Words, of which the first token has the number of the word's tag; no other token counts."""
    options = {
        "is_split_into_words": True,
        "truncation": True,
        "max_length": encoding.length,
        "verbose": False,
    }
    remedy = (
        'Set "add_prefix_space": true in its tokenizer_config.json where that is what is missing.'
    )
    with as_input_error(
        lambda error: f"the tokenizer does not take words one by one: {sentence(error)}.", remedy
    ):
        output = encoding.tokenizer(rows["tokens"], **options)
    columns: Columns = {"input_ids": output["input_ids"], "labels": [], "cut": []}
    for number, tags in enumerate(rows["tags"]):
        words = output.word_ids(number)
        pairs = zip([None, *words], words, strict=False)
        columns["labels"].append(
            [IGNORED_LABEL if word in (None, before) else tags[word] for before, word in pairs]
        )
        columns["cut"].append(
            max((word for word in words if word is not None), default=-1) < len(tags) - 1
        )
    return columns


def _answers(encoding: Encoding, rows: Columns) -> Columns:
    """A question and its context; as labels the first and the last token of the answer, the first token of all where
    there is none, and nothing where the answer is cut off."""
    options = {"truncation": "only_second", "max_length": encoding.length, "verbose": False}
    remedy = "Search with a longer sequence length, or shorten the questions."
    with as_input_error(
        lambda error: f"the tokenizer does not take questions with contexts: {sentence(error)}.",
        remedy,
    ):
        output = encoding.tokenizer(
            rows["question"], rows["context"], return_offsets_mapping=True, **options
        )
    columns: Columns = {"input_ids": output["input_ids"], "labels": [], "cut": []}
    columns["types"] = output.get("token_type_ids", [[] for _ in rows["question"]])
    for number, (context, answers, location) in enumerate(
        zip(rows["context"], rows["answers"], rows["location"], strict=True)
    ):
        offsets, inside = output["offset_mapping"][number], output.sequence_ids(number)
        seen = max(
            (end for (_, end), part in zip(offsets, inside, strict=True) if part == 1), default=0
        )
        columns["cut"].append(seen < len(context.rstrip()))
        labels = [0, 0]
        for start, text in list(zip(answers["answer_start"], answers["text"], strict=True))[:1]:
            stop = start + len(text)
            if context[start:stop] != text:
                message = f"{location}: the answer {shown(text)} is not at character {start} of the context."
                raise InputError(message, "Correct answer_start, which counts characters from 0.")
            spans = enumerate(zip(offsets, inside, strict=True))
            found = [
                token
                for token, ((begin, end), part) in spans
                if part == 1 and begin < stop and end > start
            ]
            labels = [found[0], found[-1]] if found and stop <= seen else []
        columns["labels"].append(labels)
    return columns


def _judged(encoding: Encoding, rows: Columns) -> Columns:
    """A query and a passage in one text, of which the passage is cut."""
    if is_byte_tokenizer(encoding.tokenizer):
        texts = [
            np.concatenate([byte_ids(query), byte_ids("\n"), byte_ids(passage)])
            for query, passage in zip(rows["query"], rows["passage"], strict=True)
        ]
        return _cut(texts, None, encoding.length)

    options = {"truncation": "only_second", "max_length": encoding.length, "verbose": False}
    remedy = "Search with a longer sequence length, or shorten the queries."
    with as_input_error(
        lambda error: f"the tokenizer does not take a query with its passage: {sentence(error)}.",
        remedy,
    ):
        output = encoding.tokenizer(rows["query"], rows["passage"], **options)
        whole = encoding.tokenizer(rows["query"], rows["passage"], verbose=False)
    none: list[Any] = [[] for _ in rows["query"]]
    return {
        "input_ids": output["input_ids"],
        "labels": none,
        "types": output.get("token_type_ids", none),
        "cut": [len(ids) > (encoding.length or 0) for ids in whole["input_ids"]],
    }


def _framed_ids(
    encoding: Encoding, argument: str, texts: list[str]
) -> tuple[list[tuple[Any, Any]], list[bool]]:
    """The ids of texts and which of them are the tokenizer's own, cut to the length; and which texts were cut."""
    length = encoding.length or 0
    if is_byte_tokenizer(encoding.tokenizer):  # which puts nothing around a text
        rows = [byte_ids(text) for text in texts]
        samples = [(row[:length], np.zeros_like(row[:length])) for row in rows]
        return samples, [len(row) > length for row in rows]

    def tokenized(texts: list[str], **options: Any) -> list[tuple[list[int], list[int]]]:
        if not texts:
            return []
        options |= {argument: texts, "return_special_tokens_mask": True, "verbose": False}
        output = encoding.tokenizer(**options)
        return list(zip(output["input_ids"], output["special_tokens_mask"], strict=True))

    texts = _without_frame(encoding.tokenizer, texts)
    whole = tokenized(texts)
    is_cut = [len(ids) > length for ids, _ in whole]
    too_long = [text for text, cut in zip(texts, is_cut, strict=True) if cut]
    truncated = iter(tokenized(too_long, truncation=True, max_length=length))
    return [
        next(truncated) if cut else sample for sample, cut in zip(whole, is_cut, strict=True)
    ], is_cut


def _without_frame(tokenizer: Any, texts: list[str]) -> list[str]:
    """Texts without the tokens at their ends that the tokenizer will put there itself."""
    frame = tokenizer("", verbose=False)["input_ids"]
    if frame and frame[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        first = tokenizer.convert_ids_to_tokens(frame[0])
        texts = [text.removeprefix(first) for text in texts]
    if frame and frame[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        last = tokenizer.convert_ids_to_tokens(frame[-1])
        texts = [text.removesuffix(last) for text in texts]
    return texts


def _plain_ids(tokenizer: Any, texts: list[str]) -> list[Any]:
    """The ids of texts without special tokens."""
    if is_byte_tokenizer(tokenizer):
        return [byte_ids(text) for text in texts]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.array(ids, np.int32) for ids in encoded["input_ids"]]


def _unless_begun(start: Any, ids: Any) -> Any:
    """The beginning-of-text token, but for ids that begin with it."""
    return start[:0] if np.array_equal(ids[: len(start)], start) else start


def _unless_ended(end: Any, ids: Any) -> Any:
    """The end-of-text token, but for ids that end with it."""
    return end[:0] if np.array_equal(ids[len(ids) - len(end) :], end) else end


def _start(tokenizer: Any) -> Any:
    """The beginning-of-text token, if the tokenizer itself starts every text with one."""
    first = tokenizer("", verbose=False)["input_ids"][:1]
    return np.array([token for token in first if token == tokenizer.bos_token_id], np.int32)


def _end(tokenizer: Any) -> Any:
    """The end-of-text token, if there is one."""
    return np.array([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], np.int32)


def _cut(ids: list[Any], labels: list[Any] | None, length: int | None) -> Columns:
    return {
        "input_ids": [row[:length].astype(np.int32) for row in ids],
        "labels": [row[:length].astype(np.int32) for row in labels]
        if labels
        else [[] for _ in ids],
        "cut": [length is not None and len(row) > length for row in ids],
    }
