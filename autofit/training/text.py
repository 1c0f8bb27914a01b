"""Files as training data: text and JSON lines become effective batches of token ids, images come as saved tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.training.data import IGNORED_LABEL, sample_count

_MASKED = 0.15  # of all tokens, as BERT was trained (Devlin et al. 2018, section 3.1)
_HIDDEN, _KEPT = 0.8, 0.9  # of those: 80 % hidden, 10 % kept, 10 % replaced


@dataclass(frozen=True)
class FileLoader:
    """Batches of the effective size from samples in memory, every pass in a new order; can be read again and again.

    As a DataLoader does, a pass draws its order from torch's global random numbers. The last batch is filled up from
    the front.

    Args:
        samples: a batch that holds everything, samples along dim 0.
        mask_id: hide tokens at random and make them labels (masked language models); None for no masking.
    """

    samples: dict[str, torch.Tensor]
    batch_size: int
    mask_id: int | None = None

    def __len__(self) -> int:
        return math.ceil(sample_count(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        order = torch.randperm(sample_count(self.samples), generator=generator)
        order = order.repeat(math.ceil(len(self) * self.batch_size / len(order)))
        for number in range(len(self)):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            batch = {name: tensor[chosen] for name, tensor in self.samples.items()}
            yield batch if self.mask_id is None else masked(batch["input_ids"], self.mask_id, generator)


def file_loader(workload: Workload, path: Path, *, tokenizer: Any) -> FileLoader:
    """The loader of a data file for a named model's task.

    Args:
        tokenizer: a transformers tokenizer; None takes the bytes of the text as token ids.

    Raises:
        InputError: the file is not there, is empty, or does not have the fields that the task needs.
    """
    size, length = workload.effective_batch_size, workload.sequence_length
    if workload.task == "image-classification":
        return FileLoader(_images(path), size)
    assert length is not None, "models/ gives every text task a sequence length"
    if workload.task == "sequence-classification":
        return FileLoader(_labelled(path, tokenizer, length), size)
    ids = _packed(path, tokenizer, length)
    if workload.task == "masked-lm":
        return FileLoader({"input_ids": ids}, size, mask_id=_mask_id(tokenizer))
    return FileLoader({"input_ids": ids, "labels": ids}, size)


def masked(ids: torch.Tensor, mask_id: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Input ids with 15 % of the tokens to be guessed, and labels for those only."""
    chosen = torch.rand(ids.shape, generator=generator) < _MASKED
    fate = torch.rand(ids.shape, generator=generator)
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, generator=generator)]
    shown = ids.masked_fill(chosen & (fate < _HIDDEN), mask_id)
    shown = torch.where(chosen & (fate >= _KEPT), others, shown)
    return {"input_ids": shown, "labels": ids.masked_fill(~chosen, IGNORED_LABEL)}


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"the data file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the data file {path} cannot be read as text: {error}.", "Give UTF-8 text.") from error
    if not text.strip():
        raise InputError(f"the data file {path} is empty.")
    return text


def _rows(path: Path, *fields: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error.msg}.") from error
        missing = [field for field in fields if not isinstance(row, dict) or field not in row]
        if missing:
            raise InputError(f"{path}, line {number} lacks {' and '.join(missing)}.", "Every line needs them.")
        if not isinstance(row["text"], str):
            given = type(row["text"]).__name__
            raise InputError(f"{path}, line {number}: text must be text, not {given}.", "Put it in quotation marks.")
        rows.append(row)
    return rows


def _packed(path: Path, tokenizer: Any, length: int) -> torch.Tensor:
    """All texts in a row, cut into sequences; a text too short for one is repeated."""
    texts = [row["text"] for row in _rows(path, "text")] if path.suffix == ".jsonl" else [_read(path)]
    ids = torch.tensor([token for text in texts for token in _with_end(text, tokenizer)])
    if not len(ids):
        raise InputError(f"the data file {path} holds no text.", "Give at least one line that has some.")
    ids = ids.repeat(math.ceil(length / len(ids)))
    return ids[: len(ids) // length * length].view(-1, length)


def _with_end(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        return list(text.encode())
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]


def _labelled(path: Path, tokenizer: Any, length: int) -> dict[str, torch.Tensor]:
    rows = _rows(path, "text", "label")
    names = sorted({str(row["label"]) for row in rows})
    ids = [_cut(row["text"], tokenizer, length) for row in rows]
    longest = max(len(each) for each in ids)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    return {
        "input_ids": torch.tensor([each + [pad] * (longest - len(each)) for each in ids]),
        "attention_mask": torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids]),
        "labels": torch.tensor([names.index(str(row["label"])) for row in rows]),
    }


def _cut(text: str, tokenizer: Any, length: int) -> list[int]:
    if tokenizer is None:
        return list(text.encode() or b" ")[:length]
    ids: list[int] = tokenizer(text, truncation=True, max_length=length)["input_ids"]
    return ids


def _mask_id(tokenizer: Any) -> int:
    if tokenizer is None:
        return 1  # a byte that no text has
    if tokenizer.mask_token_id is None:
        raise InputError(
            "the tokenizer has no mask token.", "Give weights with the tokenizer of a masked language model."
        )
    return int(tokenizer.mask_token_id)


def _images(path: Path) -> dict[str, torch.Tensor]:
    try:
        data = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"the data file {path} is not there.", "Check the path.") from error
    except Exception as error:  # of a file that is none it raises whatever it stumbles over, and pages of advice
        reason = type(error).__name__
        raise InputError(f"the data file {path} cannot be read: {reason}.", "Save it with torch.save.") from error
    names = ("pixel_values", "labels")
    if not isinstance(data, dict) or not all(isinstance(data.get(name), torch.Tensor) for name in names):
        raise InputError(f"the data file {path} must hold pixel_values and labels.", "Save a dict of two tensors.")
    return {name: data[name] for name in names}
