"""Text as training data: rows become samples that are packed into whole sequences, or padded within a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autofit.core.errors import InputError, counted
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import CHAT_TEMPLATE
from autofit.data.file_loader import FileLoader
from autofit.data.labels import Labels, labels_from
from autofit.data.options import DataOptions
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, TEXT, read_rows
from autofit.data.samples import Ragged, Stacked
from autofit.data.tokens import Encoding, encode, marks_assistant_turns

_FORMS = {
    "causal-lm": (TEXT, COMPLETION, MESSAGES),
    "masked-lm": (TEXT,),
    "sequence-classification": (LABELLED,),
}


@dataclass(frozen=True)
class _Tokens:
    """All rows' tokens one after the other, and where each row begins and ends."""

    ids: torch.Tensor
    labels: torch.Tensor
    spans: torch.Tensor
    cut: int

    @classmethod
    def of(cls, encoded: Any) -> _Tokens:
        """What `encode` made, out of the memory-mapped cache."""
        ids, labels = (_flat(encoded, name) for name in ("input_ids", "labels"))
        lengths = [chunk.value_lengths().to_numpy() for chunk in encoded.data.column("input_ids").chunks]
        ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        spans = torch.from_numpy(np.stack([starts, ends], axis=1))
        return cls(ids, labels if len(labels) else ids, spans, sum(encoded["cut"]))


def _flat(encoded: Any, name: str) -> torch.Tensor:
    chunks = [chunk.flatten().to_numpy() for chunk in encoded.data.column(name).chunks]
    return torch.from_numpy(np.concatenate(chunks))


def text_loader(workload: Workload, path: Path, tokenizer: Any, options: DataOptions) -> FileLoader:
    """The loader of texts in a file or directory, for a task of text.

    Raises:
        InputError: as `file_loader` does.
    """
    length, masked = workload.sequence_length, workload.task == "masked-lm"
    assert length is not None, "models/ gives every text task a sequence length"
    mask_id = _mask_id(tokenizer) if masked else None
    rows = read_rows(path, _FORMS[workload.task], by_line=options.packing is False)
    packing = rows.form == TEXT if options.packing is None else options.packing
    notes = _chat_notes(tokenizer) if rows.form == MESSAGES else []
    classes = labels_from(rows.columns["label"], rows.places, options.labels) if rows.form == LABELLED else None
    encoding = Encoding(tokenizer, None if packing else length, masked)
    tokens = _Tokens.of(encode(rows, encoding, progress=options.progress))
    if not len(tokens.ids):
        raise InputError(f"the data in {path} holds no text.", "Give at least one line that has some.")
    if tokens.cut:
        notes.append(f"cut to {length} tokens: {tokens.cut} of {counted(len(tokens.spans), 'sample')}.")
    samples: Stacked | Ragged = _packed(tokens, length) if packing else _padded(tokens, tokenizer, classes)
    kept = samples.learnt(shifted=workload.task == "causal-lm")
    if not kept.any():
        remedy = "Search with a longer sequence length, or check what is to be learnt."
        raise InputError(f"no sample of {path} has a label to learn within {length} tokens.", remedy)
    if left_out := int((~kept).sum()):
        notes.append(
            f"left out, without a label to learn within {length} tokens: {left_out} of {counted(len(kept), 'sample')}."
        )
        samples = samples.only(kept)
    names = classes.names if classes else {}
    return FileLoader(samples, workload.effective_batch_size, mask_id, notes=tuple(notes), label_names=names)


def _chat_notes(tokenizer: Any) -> list[str]:
    """What to say about the chat template; a tokenizer without one is given that of this room."""
    notes = []
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
        notes.append("the tokenizer has no chat template: a turn is written as its role, a line break and its text.")
    if not marks_assistant_turns(tokenizer):
        notes.append("the chat template does not mark the assistant's turns, so the loss is on all tokens.")
    return notes


def _packed(tokens: _Tokens, length: int) -> Stacked:
    """All tokens in a row, cut into sequences; too few for one are repeated."""

    def rows(flat: torch.Tensor) -> torch.Tensor:
        repeated = flat.repeat(math.ceil(length / len(flat)))
        return repeated[: len(repeated) // length * length].view(-1, length).long()

    ids = rows(tokens.ids)
    return Stacked({"input_ids": ids, "labels": ids if tokens.labels is tokens.ids else rows(tokens.labels)})


def _padded(tokens: _Tokens, tokenizer: Any, classes: Labels | None) -> Ragged:
    pad_id = tokenizer.pad_token_id or 0
    if classes is not None:
        return Ragged({"input_ids": tokens.ids}, tokens.spans, pad_id, {"labels": classes.numbers})
    return Ragged({"input_ids": tokens.ids, "labels": tokens.labels}, tokens.spans, pad_id)


def _mask_id(tokenizer: Any) -> int:
    if tokenizer.mask_token_id is None:
        message = "the tokenizer has no mask token."
        raise InputError(message, "Give weights with the tokenizer of a masked language model.")
    return int(tokenizer.mask_token_id)
