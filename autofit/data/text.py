"""Text as training data: rows become samples, packed into sequences or padded in a batch."""

import json
from pathlib import Path
from typing import Any

import torch

from autofit.core.errors import InputError, pluralize
from autofit.core.tasks import TASKS
from autofit.core.workload import LEARNT, Workload
from autofit.data.byte_tokenizer import CHAT_TEMPLATE
from autofit.data.chat import ChatTemplate, UnlocatedError, marks_assistant_turns, unlocated
from autofit.data.options import DataOptions
from autofit.data.rows import (
    ANSWERS,
    MESSAGES,
    PAIR,
    TEXT,
    TWINS,
    FirstRow,
    Reading,
    open_preferences,
    open_rows,
)
from autofit.data.samples import (
    FileLoader,
    Lengths,
    Packed,
    Ragged,
    Twins,
    share_note,
    span_lengths,
)
from autofit.data.token_files import Joined, Tokens
from autofit.data.tokenised import Tokenised, tokenised
from autofit.data.tokens import Encoding

_WASTE = 0.2  # share of padding in batches above which users are told


def text_loader(
    workload: Workload,
    path: Path,
    tokenizer: Any,
    options: DataOptions,
) -> FileLoader:
    """The loader of texts in a file or directory, for a task of text."""
    task = TASKS[workload.task]
    length = workload.sequence_length
    size = workload.effective_batch_size
    is_masked = task.labels == "hidden tokens"
    assert length is not None, "models/ gives every text task a sequence length"
    if is_masked and tokenizer.mask_token_id is None:
        remedy = "Give weights with the tokenizer of a masked language model."
        raise InputError("the tokenizer has no mask token.", remedy)

    are_answers = task.medium == "preferences"

    def reopened() -> Reading:
        if are_answers:
            return open_preferences(path, pairs=task.labels != "good or bad")
        return open_rows(path, task.rows, by_line=options.packing is False)

    reading = reopened()
    is_chat = reading.form == MESSAGES
    packing = reading.form == TEXT if options.packing is None else options.packing
    chat_notes = []
    if is_chat:
        chat_notes = _prepare_chat_template(tokenizer, reading.first, options.learn)

    found = tokenised(
        path,
        reading,
        reopened,
        Encoding(tokenizer, None if packing else length, options.learn, is_masked),
        options.labels,
        shifted=task.predicts_next_token or are_answers,
        progress=options.progress,
    )
    if not len(found.ids):
        message = f"the data in {path} holds no text."
        raise InputError(message, "Give at least one line that has some.")

    notes = [*found.notes, *chat_notes]
    if is_chat:
        notes += _chat_notes(tokenizer, found, options.learn)
    elif task.predicts_next_token and tokenizer.eos_token_id is None and found.rows > 1:
        notes.append("the tokenizer has no end-of-text token, so where a text ends is not learnt.")

    if found.cut:
        notes.append(share_note(f"cut to {length} tokens", found.cut, found.rows))

    padding = tokenizer.pad_token_id or 0
    if found.form == TWINS:
        return _twins_loader(found, padding, size, notes)
    if are_answers:
        return _answer_loader(found, padding, size, notes)

    samples: Packed | Ragged
    if packing:
        samples = _packed(found, length, apart=options.apart)
        has_labels = samples.has_labels(shifted=task.predicts_next_token)
    else:
        samples = _padded(found, padding)
        has_labels = found.is_learnt

    if not has_labels.any():
        message = f"no sample of {path} has a label to learn within {length} tokens."
        remedy = "Search with a longer sequence length, or check what is to be learnt."
        raise InputError(message, remedy)

    dropped = int((~has_labels).sum())
    if dropped:
        what = f"left out, without a label to learn within {length} tokens"
        notes.append(share_note(what, dropped, len(has_labels)))
        samples = samples.only(has_labels)

    lengths = None
    if task.packs:
        spans = samples.spans if isinstance(samples, Ragged) else found.spans
        lengths = Lengths.of(span_lengths(spans).clamp(1, length), size)
        note = None if packing else padding_note(lengths, size)
        if note:
            notes.append(note)

    return FileLoader(
        samples,
        size,
        mask_id=int(tokenizer.mask_token_id) if is_masked else None,
        notes=tuple(notes),
        label_names=found.class_names,
        zeros=getattr(workload.batch, "zeros", ()),
        lengths=lengths,
        form="+".join(found.form),
    )


def _packed(found: Tokenised, length: int, *, apart: bool) -> Packed:
    """All texts in a row; `apart`: they do not see one another."""
    tokens: dict[str, Tokens] = {"input_ids": found.ids}
    if found.labels is not None:
        tokens["labels"] = found.labels

    begins = None
    if apart:
        is_filled = span_lengths(found.spans) > 0
        begins = found.spans[is_filled, 0]

    return Packed.of(tokens, length, begins)


def _padded(found: Tokenised, padding: int) -> Ragged:
    """Each row as a sample. Labels are a class, places in the row, or tokens."""
    tokens: dict[str, Tokens] = {"input_ids": found.ids}
    per_sample = {}
    label_spans = None
    if found.form == ANSWERS:
        per_sample = _ends_of_answers(found)
        label_spans = found.label_spans
    elif found.classes is not None:
        per_sample["labels"] = found.classes
    else:
        tokens["labels"] = _label_tokens(found)
        if found.form == PAIR:
            label_spans = found.label_spans

    if found.types is not None:
        tokens["token_type_ids"] = found.types
    return Ragged(tokens, found.spans, padding, per_sample, label_spans)


def _label_tokens(found: Tokenised) -> Tokens:
    return found.ids if found.labels is None else found.labels


def _twins_loader(
    found: Tokenised,
    padding: int,
    size: int,
    notes: list[str],
) -> FileLoader:
    """The loader of rows of two texts."""
    assert found.labels is not None, "the second texts"
    tokens = Joined(found.ids, found.labels)
    second_spans = found.label_spans + len(found.ids)
    spans = torch.cat([found.spans, second_spans])

    texts = Ragged({"input_ids": tokens}, spans, padding)
    return _loader_of_twins(Twins(texts), found, size, notes)


def _answer_loader(
    found: Tokenised,
    padding: int,
    size: int,
    notes: list[str],
) -> FileLoader:
    """The loader of prompts with two answers each, which are rows one after the other."""
    are_learnt = found.is_learnt.view(-1, 2).all(dim=1)
    if not are_learnt.any():
        message = "no sample of the data has two answers within the sequence length."
        raise InputError(message, "Search with a longer sequence length.")

    left_out = int((~are_learnt).sum())
    if left_out:
        note = share_note(
            "left out, without room for both answers",
            left_out,
            len(are_learnt),
        )
        notes = [*notes, note]

    # The first answer of every prompt, then the second of every one.
    pairs = found.spans.view(-1, 2, 2)[are_learnt]
    spans = pairs.transpose(0, 1).flatten(0, 1)

    tokens = {"input_ids": found.ids, "labels": _label_tokens(found)}
    texts = Ragged(tokens, spans, padding)
    per_sample = {}
    if found.classes is not None:
        per_sample["desirable"] = found.classes.view(-1, 2)[are_learnt, 0]

    return _loader_of_twins(Twins(texts, per_sample), found, size, notes)


def _loader_of_twins(
    samples: Twins,
    found: Tokenised,
    size: int,
    notes: list[str],
) -> FileLoader:
    # The first text of every sample, then the second of every one.
    lengths = span_lengths(samples.texts.spans).view(2, -1).t()
    return FileLoader(
        samples,
        size,
        notes=tuple(notes),
        lengths=Lengths.of(lengths, size),
        form="+".join(found.form),
    )


def padding_note(lengths: Lengths, batch_size: int) -> str | None:
    """How much of what padded batches hold is padding, and what packing would bring; None where it
    is little."""
    if lengths.padding <= _WASTE or lengths.samples < batch_size:
        return None

    gain = 1 / (1 - lengths.padding)
    return (
        f"{lengths}: {100 * lengths.padding:.0f} % of what padded batches hold is padding. With "
        f"--packing about {gain:.1f} times as many tokens that count take the same time, but samples "
        "see those before them."
    )


def _ends_of_answers(found: Tokenised) -> dict[str, torch.Tensor]:
    """The first and the last token of each answer; anything where an answer is cut off."""
    assert found.labels is not None, "every answer that is not cut off has both"
    places = found.labels[: len(found.labels)]
    # Behind all others, for cut answers at the end.
    spare = torch.zeros(2, dtype=torch.long)
    places = torch.cat([places, spare])

    starts = found.label_spans[:, 0]
    return {
        "start_positions": places[starts],
        "end_positions": places[starts + 1],
    }


def _prepare_chat_template(tokenizer: Any, first: FirstRow, learn: str) -> list[str]:
    """Give a tokenizer without a chat template a simple one; returns notes for the user.

    Raises:
        InputError: the assistant's turns are to be learnt alone, and the template does not show
            where they are.
    """
    notes = []
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
        notes.append(
            "the tokenizer has no chat template: a turn is written as its role, a line break and "
            "its text."
        )

    tools = first.row.get("tools")
    if not isinstance(tools, list) or not tools:
        tools = None
    _end_of_turn(tokenizer, learn, tools)  # raises

    return notes


def _chat_notes(tokenizer: Any, found: Tokenised, learn: str) -> list[str]:
    """What the chat template leaves out."""
    notes = []
    tools = None
    count, shown = found.tools
    if shown is not None:
        messages, tools = [json.loads(part) for part in shown]
        if not ChatTemplate(tokenizer).shows_tools(messages, tools):
            of_all = pluralize(found.rows, "row")
            notes.append(f"the chat template leaves out the tools, which {count} of {of_all} have.")

    if _end_of_turn(tokenizer, learn, tools) == "":
        notes.append(
            "the chat template writes nothing after a turn, so where one ends is not learnt."
        )

    return notes


def _end_of_turn(tokenizer: Any, learn: str, tools: Any) -> str | None:
    """What closes the assistant's turns; None where the template marks them, or all is learnt."""
    if learn != LEARNT[0] or marks_assistant_turns(tokenizer, tools):
        return None
    try:
        return ChatTemplate(tokenizer).end_of_turn(tools)
    except UnlocatedError as error:
        raise unlocated(error) from error
