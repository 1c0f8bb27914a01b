"""Text as training data: rows become samples, packed into whole sequences or padded within a batch."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autofit.core.errors import InputError, pluralize
from autofit.core.tasks import TASKS
from autofit.core.workload import LEARNT, Workload
from autofit.data.batch import IGNORED_LABEL
from autofit.data.byte_tokenizer import CHAT_TEMPLATE
from autofit.data.chat import ChatTemplate, UnlocatedError, marks_assistant_turns, unlocated
from autofit.data.labels import Labels, labels_from
from autofit.data.options import DataOptions, LabelRule
from autofit.data.rows import (
    ANSWERS,
    LABELLED,
    MESSAGES,
    PAIR,
    TAGGED,
    TEXT,
    TWINS,
    Rows,
    read_rows,
)
from autofit.data.samples import FileLoader, Lengths, Ragged, Stacked, Twins
from autofit.data.tokens import Encoding, encode

_WASTE = 0.2  # of what batches hold: more padding than this is told


def text_loader(workload: Workload, path: Path, tokenizer: Any, options: DataOptions) -> FileLoader:
    """The loader of texts in a file or directory, for a task of text."""
    task = TASKS[workload.task]
    length = workload.sequence_length
    size = workload.effective_batch_size
    is_masked = task.labels == "hidden tokens"
    assert length is not None, "models/ gives every text task a sequence length"
    if is_masked and tokenizer.mask_token_id is None:
        remedy = "Give weights with the tokenizer of a masked language model."
        raise InputError("the tokenizer has no mask token.", remedy)

    rows = read_rows(path, task.rows, by_line=options.packing is False)
    packing = rows.form == TEXT if options.packing is None else options.packing
    notes = list(rows.notes)
    if rows.form == MESSAGES:
        notes += _prepare_chat_template(tokenizer, rows, options.learn)
    elif task.predicts_next_token and tokenizer.eos_token_id is None and len(rows.locations) > 1:
        notes.append("the tokenizer has no end-of-text token, so where a text ends is not learnt.")
    rows, classes = _classes(rows, options.labels)

    encoding = Encoding(tokenizer, None if packing else length, options.learn, is_masked)
    encoded = encode(rows, encoding, progress=options.progress)
    ids = _flat(encoded, "input_ids")
    labels = _flat(encoded, "labels")
    spans = _spans(encoded, "input_ids")
    padding = tokenizer.pad_token_id or 0
    if not len(ids):
        raise InputError(
            f"the data in {path} holds no text.", "Give at least one line that has some."
        )
    if cut := sum(encoded["cut"]):
        notes.append(f"cut to {length} tokens: {cut} of {pluralize(len(encoded), 'sample')}.")

    samples: Stacked | Ragged
    if rows.form == TWINS:
        both = torch.cat([spans, _spans(encoded, "labels") + len(ids)])
        texts = Ragged({"input_ids": torch.cat([ids, labels])}, both, padding)
        return FileLoader(Twins(texts), size, notes=tuple(notes))
    if packing:
        inputs = _packed(ids, length)
        targets = _packed(labels, length) if len(labels) else inputs
        apart = _apart(spans, targets) if options.apart else {}
        samples = Stacked({"input_ids": inputs, "labels": targets, **apart})
    elif rows.form == ANSWERS:
        types = _flat(encoded, "types")
        by_token = {"input_ids": ids, "token_type_ids": types} if len(types) else {"input_ids": ids}
        answers = _spans(encoded, "labels")
        starts = answers[:, 0]
        places = torch.cat([labels, labels.new_zeros(2)]).long()
        ends = {"start_positions": places[starts], "end_positions": places[starts + 1]}
        samples = Ragged(by_token, spans, padding, ends, answers)
    elif classes and task.classifies_texts:
        samples = Ragged({"input_ids": ids}, spans, padding, {"labels": classes.numbers})
    else:
        by_token = {"input_ids": ids, "labels": labels if len(labels) else ids}
        targets_apart = _spans(encoded, "labels") if rows.form == PAIR else None
        samples = Ragged(by_token, spans, padding, label_spans=targets_apart)

    has_labels = samples.has_labels(shifted=task.predicts_next_token)
    if not has_labels.any():
        remedy = "Search with a longer sequence length, or check what is to be learnt."
        raise InputError(
            f"no sample of {path} has a label to learn within {length} tokens.", remedy
        )
    if dropped := int((~has_labels).sum()):
        of_all = pluralize(len(has_labels), "sample")
        notes.append(
            f"left out, without a label to learn within {length} tokens: {dropped} of {of_all}."
        )
        samples = samples.only(has_labels)

    lengths = None
    if task.packs:
        if isinstance(samples, Ragged):
            spans = samples.spans
        lengths = Lengths.of((spans[:, 1] - spans[:, 0]).clamp(1, length), size)
        if not packing and (note := padding_note(lengths, size)):
            notes.append(note)
    return FileLoader(
        samples,
        size,
        mask_id=int(tokenizer.mask_token_id) if is_masked else None,
        notes=tuple(notes),
        label_names=classes.names if classes else {},
        zeros=getattr(workload.batch, "zeros", ()),
        lengths=lengths,
        form="+".join(rows.form),
    )


def padding_note(lengths: Lengths, batch_size: int) -> str | None:
    """How much of what padded batches hold is padding, and what packing would bring; None where it is little."""
    if lengths.padding <= _WASTE or lengths.samples < batch_size:
        return None
    return (
        f"{lengths}: {100 * lengths.padding:.0f} % of what padded batches hold is padding. With --packing about "
        f"{1 / (1 - lengths.padding):.1f} times as many tokens that count take the same time, but samples see those "
        "before them."
    )


def _classes(rows: Rows, rule: LabelRule) -> tuple[Rows, Labels | None]:
    """The classes of samples, or of words, whose tags become their numbers."""
    if rows.form == LABELLED:
        return rows, labels_from(rows.columns["label"], rows.locations, rule)
    if rows.form != TAGGED:
        return rows, None
    words, tags = rows.columns["tokens"], rows.columns["tags"]
    for given, tagged, location in zip(words, tags, rows.locations, strict=True):
        if len(given) != len(tagged):
            raise InputError(
                f"{location}: {len(given)} words have {len(tagged)} tags.",
                "Give each word one tag.",
            )
    located = [location for row, location in zip(tags, rows.locations, strict=True) for _ in row]
    classes = labels_from([tag for row in tags for tag in row], located, rule)
    numbers = [part.tolist() for part in classes.numbers.split([len(row) for row in tags])]
    return replace(rows, columns={"tokens": words, "tags": numbers}), classes


def _prepare_chat_template(tokenizer: Any, rows: Rows, learn: str) -> list[str]:
    """Give a tokenizer without a chat template a simple one; returns notes for the user.

    Raises:
        InputError: the assistant's turns are to be learnt alone, and the template does not show where they are.
    """
    notes = []
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
        notes.append(
            "the tokenizer has no chat template: a turn is written as its role, a line break and its text."
        )

    template = ChatTemplate(tokenizer)
    with_tools = [place for place, tools in enumerate(rows.columns.get("tools", ())) if tools]
    tools = None
    if with_tools:
        first = with_tools[0]
        tools = json.loads(rows.columns["tools"][first])
        if not template.shows_tools(json.loads(rows.columns["messages"][first]), tools):
            of_all = pluralize(len(rows.locations), "row")
            notes.append(
                f"the chat template leaves out the tools, which {len(with_tools)} of {of_all} have."
            )

    if learn == LEARNT[0] and not marks_assistant_turns(tokenizer, tools):
        try:
            end = template.end_of_turn(tools)
        except UnlocatedError as error:
            raise unlocated(error) from error
        if not end:
            notes.append(
                "the chat template writes nothing after a turn, so where one ends is not learnt."
            )
    return notes


def _flat(encoded: Any, name: str) -> torch.Tensor:
    """A column's rows one after the other, out of the memory-mapped cache."""
    return torch.from_numpy(
        np.concatenate([chunk.flatten().to_numpy() for chunk in encoded.data.column(name).chunks])
    )


def _spans(encoded: Any, name: str) -> torch.Tensor:
    """Where each row begins and ends among all tokens of a column, [rows, 2]."""
    lengths = [chunk.value_lengths().to_numpy() for chunk in encoded.data.column(name).chunks]
    ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    return torch.from_numpy(np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1))


def _apart(spans: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions that start again with each sample, by which attention sees no other; and labels without those that
    would follow from the sample before."""
    begins = torch.zeros(int(spans[-1, 1]), dtype=torch.long)
    begins[spans[spans[:, 0] < spans[:, 1], 0]] = 1
    begins = _packed(begins, labels.shape[1])
    begins[:, 0] = 1
    places = torch.arange(labels.shape[1]).expand_as(begins)
    positions = places - (places * begins).cummax(dim=1).values
    return {"position_ids": positions, "labels": labels.masked_fill(begins == 1, IGNORED_LABEL)}


def _packed(flat: torch.Tensor, length: int) -> torch.Tensor:
    """All tokens in a row, cut into sequences; too few for one are repeated."""
    repeated = flat.repeat(math.ceil(length / len(flat)))
    return repeated[: len(repeated) // length * length].view(-1, length).long()
