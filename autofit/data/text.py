"""Text as training data: rows become samples, packed into whole sequences or padded within a batch."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autofit.core.errors import InputError, counted
from autofit.core.workload import LEARNT, Workload
from autofit.data.batch import IGNORED_LABEL
from autofit.data.byte_tokenizer import CHAT_TEMPLATE
from autofit.data.chat import ChatTemplate, UnlocatedError, marks_assistant_turns, unlocated
from autofit.data.labels import Labels, labels_from
from autofit.data.options import DataOptions, LabelRule
from autofit.data.rows import ANSWERS, COMPLETION, LABELLED, MESSAGES, PAIR, TAGGED, TEXT, TWINS, Rows, read_rows
from autofit.data.samples import FileLoader, Lengths, Ragged, Stacked, Twins
from autofit.data.tokens import Encoding, encode

FORMS = {
    "causal-lm": (TEXT, COMPLETION, MESSAGES),
    "masked-lm": (TEXT,),
    "sequence-classification": (LABELLED,),
    "seq2seq": (PAIR,),
    "token-classification": (TAGGED,),
    "embeddings": (TWINS,),
    "question-answering": (ANSWERS,),
}

PACKED = ("causal-lm", "masked-lm")  # tasks whose samples can be put one after the other
_WASTE = 0.2  # of what batches hold: more padding than this is told


def text_loader(workload: Workload, path: Path, tokenizer: Any, options: DataOptions) -> FileLoader:
    """The loader of texts in a file or directory, for a task of text."""
    length, is_masked = workload.sequence_length, workload.task == "masked-lm"
    assert length is not None, "models/ gives every text task a sequence length"
    if is_masked and tokenizer.mask_token_id is None:
        remedy = "Give weights with the tokenizer of a masked language model."
        raise InputError("the tokenizer has no mask token.", remedy)
    rows = read_rows(path, FORMS[workload.task], by_line=options.packing is False)
    packing = rows.form == TEXT if options.packing is None else options.packing
    notes = []
    if rows.form == MESSAGES:
        notes = _prepare_chat_template(tokenizer, rows, options.learn)
    elif workload.task == "causal-lm" and tokenizer.eos_token_id is None and len(rows.locations) > 1:
        notes.append("the tokenizer has no end-of-text token, so where a text ends is not learnt.")
    rows, classes = _classes(rows, options.labels)
    encoding = Encoding(tokenizer, None if packing else length, options.learn, is_masked)
    encoded = encode(rows, encoding, progress=options.progress)
    ids, labels = _flat(encoded, "input_ids"), _flat(encoded, "labels")
    if not len(ids):
        raise InputError(f"the data in {path} holds no text.", "Give at least one line that has some.")
    notes = [*rows.notes, *notes]
    if cut := sum(encoded["cut"]):
        notes.append(f"cut to {length} tokens: {cut} of {counted(len(encoded), 'sample')}.")
    size, zeros = workload.effective_batch_size, getattr(workload.batch, "zeros", ())
    if rows.form == TWINS:
        spans = torch.cat([_spans(encoded, "input_ids"), _spans(encoded, "labels") + len(ids)])
        texts = Ragged({"input_ids": torch.cat([ids, labels])}, spans, tokenizer.pad_token_id or 0)
        return FileLoader(Twins(texts), size, notes=tuple(notes))
    samples: Stacked | Ragged
    if packing:
        inputs = _packed(ids, length)
        targets = _packed(labels, length) if len(labels) else inputs
        apart = _apart(_spans(encoded, "input_ids"), targets) if options.apart else {}
        samples = Stacked({"input_ids": inputs, "labels": targets, **apart})
    else:
        by_token = {"input_ids": ids, "labels": labels if len(labels) else ids}
        per_sample = {}
        if classes and rows.form == LABELLED:
            by_token, per_sample = {"input_ids": ids}, {"labels": classes.numbers}
        label_spans = _spans(encoded, "labels") if rows.form in (PAIR, ANSWERS) else None
        if label_spans is not None and rows.form == ANSWERS:
            types, places = _flat(encoded, "types"), torch.cat([labels, labels.new_zeros(2)]).long()
            by_token = {"input_ids": ids, **({"token_type_ids": types} if len(types) else {})}
            starts = label_spans[:, 0]
            per_sample = {"start_positions": places[starts], "end_positions": places[starts + 1]}
        samples = Ragged(by_token, _spans(encoded, "input_ids"), tokenizer.pad_token_id or 0, per_sample, label_spans)
    has_labels = samples.has_labels(shifted=workload.task == "causal-lm")
    if not has_labels.any():
        remedy = "Search with a longer sequence length, or check what is to be learnt."
        raise InputError(f"no sample of {path} has a label to learn within {length} tokens.", remedy)
    if dropped := int((~has_labels).sum()):
        of_all = counted(len(has_labels), "sample")
        notes.append(f"left out, without a label to learn within {length} tokens: {dropped} of {of_all}.")
        samples = samples.only(has_labels)
    lengths = None
    if workload.task in PACKED:
        spans = samples.spans if isinstance(samples, Ragged) else _spans(encoded, "input_ids")
        lengths = Lengths.of((spans[:, 1] - spans[:, 0]).clamp(1, length), size)
        if not packing and (note := padding_note(lengths, size)):
            notes.append(note)
    mask_id = int(tokenizer.mask_token_id) if is_masked else None
    label_names = classes.names if classes else {}
    of_texts: dict[str, Any] = {"label_names": label_names, "zeros": zeros, "lengths": lengths}
    of_texts["form"] = "+".join(rows.form)
    return FileLoader(samples, size, mask_id, notes=tuple(notes), **of_texts)


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
            raise InputError(f"{location}: {len(given)} words have {len(tagged)} tags.", "Give each word one tag.")
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
        notes.append("the tokenizer has no chat template: a turn is written as its role, a line break and its text.")

    template = ChatTemplate(tokenizer)
    with_tools = [place for place, tools in enumerate(rows.columns.get("tools", ())) if tools]
    tools = None
    if with_tools:
        first = with_tools[0]
        tools = json.loads(rows.columns["tools"][first])
        if not template.shows_tools(json.loads(rows.columns["messages"][first]), tools):
            of_all = counted(len(rows.locations), "row")
            notes.append(f"the chat template leaves out the tools, which {len(with_tools)} of {of_all} have.")

    if learn == LEARNT[0] and not marks_assistant_turns(tokenizer, tools):
        try:
            end = template.end_of_turn(tools)
        except UnlocatedError as error:
            raise unlocated(error) from error
        if not end:
            notes.append("the chat template writes nothing after a turn, so where one ends is not learnt.")
    return notes


def _flat(encoded: Any, name: str) -> torch.Tensor:
    """A column's rows one after the other, out of the memory-mapped cache."""
    return torch.from_numpy(np.concatenate([chunk.flatten().to_numpy() for chunk in encoded.data.column(name).chunks]))


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
