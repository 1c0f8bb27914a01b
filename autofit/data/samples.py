"""Samples in memory, and the batch that some of them make: stacked when all are of one size, padded when not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.data.batch import IGNORED_LABEL, sample_count


class Samples(Protocol):
    """What a FileLoader takes its batches from."""

    def __len__(self) -> int: ...

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        """The samples of these numbers, as a batch."""
        ...

    def largest(self, name: str) -> int | None:
        """The largest number in the tensors of that name; None where there are none."""
        ...


@dataclass(frozen=True)
class Stacked:
    """A batch that holds everything, samples along dim 0."""

    tensors: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return sample_count(self.tensors)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}

    def largest(self, name: str) -> int | None:
        return int(self.tensors[name].max()) if name in self.tensors else None

    def learnt(self, *, shifted: bool) -> torch.Tensor:
        """For each sample whether a label of it counts; `shifted`: the first never does."""
        return (self.tensors["labels"][:, int(shifted) :] != IGNORED_LABEL).any(dim=1)

    def only(self, kept: torch.Tensor) -> Stacked:
        """The samples where `kept` is true."""
        return Stacked({name: tensor[kept] for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, one after the other; a batch is padded to its longest one.

    Args:
        tokens: `input_ids`, and `labels` where they are per token, [all tokens].
        spans: where each sample begins and ends in them, [samples, 2].
        pad_id: fills up input ids; labels are filled with what no loss counts.
        per_sample: what there is one of for each sample, [samples].
    """

    tokens: Mapping[str, torch.Tensor]
    spans: torch.Tensor
    pad_id: int
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.spans)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        spans = self.spans[chosen]
        lengths = spans[:, 1] - spans[:, 0]
        padded = {name: self._padded(name, spans) for name in self.tokens}
        mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
        rest = {name: tensor[chosen] for name, tensor in self.per_sample.items()}
        return {"input_ids": padded.pop("input_ids"), "attention_mask": mask, **padded, **rest}

    def _padded(self, name: str, spans: torch.Tensor) -> torch.Tensor:
        rows = [self.tokens[name][start:stop] for start, stop in spans.tolist()]
        filling = self.pad_id if name == "input_ids" else IGNORED_LABEL
        return pad_sequence(rows, batch_first=True, padding_value=filling).long()

    def largest(self, name: str) -> int | None:
        found = self.tokens.get(name, self.per_sample.get(name))
        filling = self.pad_id if name == "input_ids" else 0
        return None if found is None else max(filling, int(found.max()))

    def learnt(self, *, shifted: bool) -> torch.Tensor:
        """For each sample whether a label of it counts; `shifted`: the first never does."""
        starts, ends = self.spans.unbind(dim=1)
        if "labels" not in self.tokens:
            return ends > starts
        counted = (self.tokens["labels"] != IGNORED_LABEL).cumsum(dim=0)
        before = torch.cat([counted.new_zeros(1), counted])
        return before[ends] > before[(starts + int(shifted)).minimum(ends)]

    def only(self, kept: torch.Tensor) -> Ragged:
        """The samples where `kept` is true."""
        per_sample = {name: tensor[kept] for name, tensor in self.per_sample.items()}
        return Ragged(self.tokens, self.spans[kept], self.pad_id, per_sample)


@dataclass(frozen=True)
class Pictures:
    """Pixels as bytes in a file of the cache, made numbers when a batch is taken.

    Args:
        pixels: one item of bytes per image, [channels, height, width].
        shape: of an image.
        mean, deviation: of each channel, of values from 0 to 1; what training data is normalised with.
    """

    pixels: Any
    labels: torch.Tensor
    shape: tuple[int, int, int]
    mean: torch.Tensor
    deviation: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        images = [np.frombuffer(self.pixels[number].as_buffer(), np.uint8) for number in chosen.tolist()]
        values = torch.from_numpy(np.stack(images)).view(-1, *self.shape).float() / 255
        normalised = (values - self.mean.view(-1, 1, 1)) / self.deviation.view(-1, 1, 1)
        return {"pixel_values": normalised, "labels": self.labels[chosen]}

    def largest(self, name: str) -> int | None:
        return int(self.labels.max()) if name == "labels" else None
