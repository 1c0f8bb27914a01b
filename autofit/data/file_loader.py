"""Batches of the effective size from samples in memory: shuffled to train on, in order to evaluate on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autofit.data.batch import IGNORED_LABEL
from autofit.data.samples import Samples

_MASKED = 0.15  # of all tokens, as BERT was trained (Devlin et al. 2018, section 3.1)
_HIDDEN, _KEPT = 0.8, 0.9  # of those: 80 % hidden, 10 % kept, 10 % replaced
_EVALUATION_SEED = 0  # what is hidden in evaluation data is the same each time, so that losses can be compared


@dataclass(frozen=True)
class FileLoader:
    """Batches of the effective size from samples in memory, every pass in a new order; can be read again and again.

    As a DataLoader does, a pass draws its order from torch's global random numbers. The last batch is filled up from
    the front.

    Args:
        mask_id: hide tokens at random and make them labels (masked language models); None for no masking.
        notes: what the user should know about how the samples were made, a sentence each.
        label_names: the numbers of classes that have names in the data.
    """

    samples: Samples
    batch_size: int
    mask_id: int | None = None
    notes: tuple[str, ...] = ()
    label_names: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        order = torch.randperm(len(self.samples), generator=generator)
        order = order.repeat(math.ceil(len(self) * self.batch_size / len(order)))
        return self._batches(order[: len(self) * self.batch_size], generator)

    def in_order(self) -> Iterator[dict[str, torch.Tensor]]:
        """Every sample once, as the file has them, without a draw from torch's global random numbers."""
        return self._batches(torch.arange(len(self.samples)), torch.Generator().manual_seed(_EVALUATION_SEED))

    def _batches(self, order: torch.Tensor, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
        for chosen in order.split(self.batch_size):
            batch = self.samples.batch(chosen)
            yield batch if self.mask_id is None else masked(batch, self.mask_id, generator)


def masked(batch: dict[str, torch.Tensor], mask_id: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The batch with 15 % of the tokens to be guessed, and labels for those only.

    Labels that the batch has say which tokens may be guessed: not padding, not the tokenizer's own.
    """
    ids = batch["input_ids"]
    may_be = batch["labels"] != IGNORED_LABEL if "labels" in batch else torch.ones_like(ids, dtype=torch.bool)
    chosen = (torch.rand(ids.shape, generator=generator) < _MASKED) & may_be
    fate = torch.rand(ids.shape, generator=generator)
    drawn_from = ids[may_be]
    others = drawn_from[torch.randint(len(drawn_from), ids.shape, generator=generator)]
    shown = ids.masked_fill(chosen & (fate < _HIDDEN), mask_id)
    shown = torch.where(chosen & (fate >= _KEPT), others, shown)
    return {**batch, "input_ids": shown, "labels": ids.masked_fill(~chosen, IGNORED_LABEL)}
