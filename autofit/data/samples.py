"""Samples in memory, and the loader that batches them: shuffled for training, in order for evaluation."""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.core.errors import is_whole, shown
from autofit.core.workload import Rows
from autofit.data.options import IGNORED_LABEL
from autofit.data.token_files import Tokens, largest

_CHOSEN = 0.15  # of all tokens, as BERT was trained (Devlin et al. 2018, section 3.1)
_HIDDEN, _HIDDEN_OR_UNCHANGED = 0.8, 0.9  # of those: 80 % hidden, 10 % unchanged, 10 % replaced
_MOST_SEED = 2**62
_LOOKED_AT = 2**20  # tokens whose labels are looked at at once
_EVALUATION_SEED = (
    0  # the same tokens are hidden each time, so that evaluation losses can be compared
)


class Samples(Protocol):
    """What a loader batches."""

    def __len__(self) -> int: ...

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        """The samples of these indices, as a batch."""

    def largest_id(self) -> int:
        """The largest token id; 0 where there are no tokens."""


@dataclass(frozen=True)
class Stacked:
    """Samples of one size, in tensors with the samples along dim 0."""

    tensors: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        return Rows({name: tensor[chosen] for name, tensor in self.tensors.items()})

    def largest_id(self) -> int:
        return int(self.tensors["input_ids"].max())


@dataclass(frozen=True)
class Packed:
    """All texts in a row, cut into sequences of one length; too few tokens for one are repeated.

    Attributes:
        tokens: `input_ids`, and `labels` where they are others; [all tokens].
        starts: of each sample among the tokens, as if they were repeated without end.
        begins: where texts begin among the tokens, in order, to keep them apart; None: they see
            those before them.
    """

    tokens: Mapping[str, Tokens]
    length: int
    starts: torch.Tensor
    begins: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Mapping[str, Tokens], length: int, begins: torch.Tensor | None) -> "Packed":
        """All whole sequences."""
        sequences = max(1, len(tokens["input_ids"]) // length)
        return cls(tokens, length, torch.arange(sequences) * length, begins)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        starts = self.starts[chosen].tolist()
        rows = Rows()
        for name in ("input_ids", "labels"):
            tokens = self.tokens.get(name, self.tokens["input_ids"])
            rows[name] = torch.stack([self._sequence(tokens, start) for start in starts])
        if self.begins is None:
            return rows

        begins = torch.zeros(len(starts), self.length, dtype=torch.long)
        for number, start in enumerate(starts):
            begins[number, self._begins_within(start)] = 1
        begins[:, 0] = 1
        places = torch.arange(self.length).expand_as(begins)
        # Labels that would follow from the sample before do not count.
        rows["labels"] = rows["labels"].masked_fill(begins == 1, IGNORED_LABEL)
        rows["position_ids"] = places - (places * begins).cummax(dim=1).values
        return rows

    def _sequence(self, tokens: Tokens, start: int) -> torch.Tensor:
        found = tokens[start : start + self.length]
        if len(found) == self.length:
            return found
        return found.repeat(math.ceil(self.length / len(found)))[: self.length]

    def _begins_within(self, start: int) -> torch.Tensor:
        """Where texts begin in the sequence from a start."""
        assert self.begins is not None, "asked only where texts are apart"
        ends = torch.searchsorted(self.begins, torch.tensor([start, start + self.length]))
        found = self.begins[ends[0] : ends[1]] - start
        total = len(self.tokens["input_ids"])
        if total >= self.length:
            return found
        repeats = torch.arange(0, self.length, total)
        repeated = (repeats.unsqueeze(1) + found).flatten()
        return repeated[repeated < self.length]

    def largest_id(self) -> int:
        return max(largest(tokens) for tokens in self.tokens.values())

    def has_labels(self, *, shifted: bool) -> torch.Tensor:
        """For each sample whether a label counts; `shifted`: the first never does."""
        if "labels" not in self.tokens and self.begins is None:
            return torch.full((len(self),), self.length > int(shifted))
        found = []
        for chosen in torch.arange(len(self)).split(max(1, _LOOKED_AT // self.length)):
            labels = self.batch(chosen)["labels"][:, int(shifted) :]
            found.append((labels != IGNORED_LABEL).any(dim=1))
        return torch.cat(found)

    def only(self, mask: torch.Tensor) -> "Packed":
        """The samples where `mask` is true."""
        return replace(self, starts=self.starts[mask])


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, one after the other; a batch is padded to its longest one."""

    # `input_ids`, `labels` where they are tokens, `token_type_ids`; [all tokens]
    tokens: Mapping[str, Tokens]
    spans: torch.Tensor  # where each sample begins and ends in them, [samples, 2]
    pad_id: int  # pads input ids; labels are padded with the ignored label
    # tensors of one value per sample, [samples]
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)
    label_spans: torch.Tensor | None = None  # of labels that are a text of their own

    def __len__(self) -> int:
        return len(self.spans)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        spans = self.spans[chosen]
        lengths = spans[:, 1] - spans[:, 0]
        mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
        padded = {}
        for name, tokens in self.tokens.items():
            own = self.label_spans if name == "labels" else None
            sequences = [
                tokens[start:stop]
                for start, stop in (spans if own is None else own[chosen]).tolist()
            ]
            padding = {"input_ids": self.pad_id, "labels": IGNORED_LABEL}.get(name, 0)
            padded[name] = pad_sequence(sequences, batch_first=True, padding_value=padding).long()
        per_sample = {name: tensor[chosen] for name, tensor in self.per_sample.items()}
        return {
            "input_ids": padded.pop("input_ids"),
            "attention_mask": mask,
            **padded,
            **per_sample,
        }

    def longest(self) -> torch.Tensor:
        """The samples with the longest texts: of inputs, and of labels of their own."""
        all_spans = [self.spans]
        if self.label_spans is not None:
            all_spans.append(self.label_spans)
        return torch.stack([(spans[:, 1] - spans[:, 0]).argmax() for spans in all_spans])

    def largest_id(self) -> int:
        return max(self.pad_id, *(largest(tokens) for tokens in self.tokens.values()))

    def only(self, mask: torch.Tensor) -> "Ragged":
        per_sample = {name: tensor[mask] for name, tensor in self.per_sample.items()}
        label_spans = None if self.label_spans is None else self.label_spans[mask]
        return Ragged(self.tokens, self.spans[mask], self.pad_id, per_sample, label_spans)


@dataclass(frozen=True)
class Lengths:
    """How long the samples of a file are, in tokens, and the share of padded batches that is padding."""

    samples: int
    shortest: int
    longest: int
    mean: float
    padding: float

    @classmethod
    def of(cls, lengths: torch.Tensor, batch_size: int) -> "Lengths":
        """Of samples that are batched in an order drawn at random.

        Args:
            lengths: [samples], or [samples, texts] where each has several, which are padded alike.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = lengths[torch.randperm(len(lengths), generator=generator)]
        whole = len(drawn) // batch_size * batch_size
        of_batch = batch_size * lengths[0].numel()
        batches = drawn[:whole].reshape(whole // batch_size, of_batch)
        held = of_batch * int(batches.amax(dim=1).sum())
        if whole < len(drawn):
            held += drawn[whole:].numel() * int(drawn[whole:].max())
        found = int(lengths.min()), int(lengths.max()), float(lengths.double().mean())
        return cls(len(lengths), *found, 1 - int(lengths.sum()) / held)

    def __str__(self) -> str:
        return f"samples have {self.shortest} to {self.longest} tokens, {self.mean:.0f} in the mean"


@dataclass(frozen=True)
class Twins:
    """Two texts to a sample, side by side: [samples, 2, tokens]."""

    texts: Ragged  # the first text of every sample, then the second of every one
    # tensors of one row per sample, [samples, ...]
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts) // 2

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.stack([chosen, chosen + len(self)], dim=1)
        texts = {
            name: part.unflatten(0, (-1, 2))
            for name, part in self.texts.batch(both.flatten()).items()
        }
        return texts | {name: tensor[chosen] for name, tensor in self.per_sample.items()}

    def with_column(self, name: str, column: torch.Tensor) -> "Twins":
        """The same with a further tensor of one row per sample."""
        return replace(self, per_sample={**self.per_sample, name: column})

    def longest(self) -> torch.Tensor:
        """The sample with the longest text."""
        return self.texts.longest() % len(self)

    def largest_id(self) -> int:
        return self.texts.largest_id()


@dataclass(frozen=True)
class Pictures:
    """Pixels as bytes of each image, [channels, height, width], in a cache file; normalised when a batch is taken."""

    pixels: Any
    labels: torch.Tensor
    shape: tuple[int, int, int]
    mean: torch.Tensor
    deviation: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        images = [
            np.frombuffer(self.pixels[index].as_buffer(), np.uint8) for index in chosen.tolist()
        ]
        values = torch.from_numpy(np.stack(images)).view(-1, *self.shape).float() / 255
        normalised = (values - self.mean.view(-1, 1, 1)) / self.deviation.view(-1, 1, 1)
        return {"pixel_values": normalised, "labels": self.labels[chosen]}

    def largest_id(self) -> int:
        return 0


@dataclass
class _Place:
    """How far a pass over a loader is, None before the first; `loaded`: the next pass goes on there."""

    seed: int | None = None
    samples: int = 0  # that it gave
    loaded: bool = False


@dataclass(frozen=True)
class FileLoader:
    """Batches of the effective size, each pass in a new order; can be read again and again. A pass draws its order from
    torch's global random numbers, as a DataLoader's. Its front fills up the last batch. As torchdata's
    StatefulDataLoader it can go on where a pass stopped, without making what was given again."""

    samples: Samples
    batch_size: int
    mask_id: int | None = (
        None  # hides tokens at random, which become labels (masked language models)
    )
    # what the user should know about how the samples were made, a sentence each
    notes: tuple[str, ...] = ()
    # the numbers of classes that have names in the data
    label_names: Mapping[str, int] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()  # further arguments of the forward, zero for each token
    ahead: bool = False  # make the next batch while one is used: of samples that take long
    lengths: Lengths | None = None  # of what can be packed, before it is
    form: str | None = None  # the fields of the rows that were read, as "prompt+completion"
    # A column of the samples that is to be filled before training, [samples, ...].
    blank: torch.Tensor | None = field(default=None, compare=False)
    _place: _Place = field(default_factory=_Place, compare=False, repr=False)

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        place = self._place
        if not place.loaded or place.seed is None:
            place.seed = int(torch.randint(_MOST_SEED, ()))
            place.samples = 0
        place.loaded = False

        generator = torch.Generator().manual_seed(place.seed)
        order = torch.randperm(len(self.samples), generator=generator)
        order = order.repeat(math.ceil(len(self) * self.batch_size / len(order)))
        begun = place.samples // self.batch_size
        batches = self._batches(order[: len(self) * self.batch_size], generator, place.samples)
        for number, batch in enumerate(batches, begun + 1):
            place.samples = number * self.batch_size
            yield batch

    def with_blank(self, name: str) -> "FileLoader":
        """The same with a column of the two texts of each sample, to be filled."""
        assert isinstance(self.samples, Twins), "only two texts have one"
        blank = torch.zeros(len(self.samples), 2)
        return replace(self, samples=self.samples.with_column(name, blank), blank=blank)

    def in_order(self) -> Iterator[dict[str, torch.Tensor]]:
        """Every sample once, in the file's order, without a draw from torch's global random numbers."""
        return self._batches(
            torch.arange(len(self.samples)), torch.Generator().manual_seed(_EVALUATION_SEED)
        )

    def longest(self) -> dict[str, torch.Tensor] | None:
        """A batch of the longest samples; None where they have no length before they are made."""
        if not isinstance(self.samples, Ragged | Twins):
            return None
        generator = torch.Generator().manual_seed(_EVALUATION_SEED)
        return next(self._batches(self.samples.longest(), generator))

    def state_dict(self) -> dict[str, int | None]:
        """The pass under way, and how many samples it gave."""
        return {"seed": self._place.seed, "samples": self._place.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that pass when the next one begins, within a batch where it has other sizes now. Raises ValueError
        for a place that is none."""
        seed = state["seed"]
        samples = state["samples"]
        if not is_whole(samples, 0) or not (
            seed is None or (is_whole(seed, 0) and seed < _MOST_SEED)
        ):
            raise ValueError(f"no place: {shown(dict(state))}")
        self._place.seed = seed
        self._place.samples = samples
        self._place.loaded = True

    def _batches(
        self, order: torch.Tensor, generator: torch.Generator, samples: int = 0
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The batches behind samples that are given; the numbers that hide tokens of those are drawn again."""
        given, begun = divmod(samples, self.batch_size)
        start = given if self.mask_id is None else 0

        def chunks() -> Iterator[torch.Tensor]:
            for first in range(start * self.batch_size, len(order), self.batch_size):
                chunk = order[first : first + self.batch_size]
                yield chunk[begun:] if first == given * self.batch_size else chunk

        for number, batch in enumerate(self._made(chunks()), start):
            batch |= {name: torch.zeros_like(batch["input_ids"]) for name in self.zeros}
            batch = batch if self.mask_id is None else masked(batch, self.mask_id, generator)
            if number >= given:
                yield batch

    def _made(self, chunks: Iterator[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        if not self.ahead:
            yield from map(self.samples.batch, chunks)
            return
        with ThreadPoolExecutor(1) as worker:
            coming: Future[dict[str, torch.Tensor]] | None = None
            for chunk in chunks:
                ready, coming = coming, worker.submit(self.samples.batch, chunk)
                if ready:
                    yield ready.result()
            if coming:
                yield coming.result()


def masked(
    batch: dict[str, torch.Tensor], mask_id: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The batch with 15 % of the tokens to predict, and labels for those only. Existing labels mark the tokens that may
    be chosen: not padding, not the tokenizer's own."""
    ids = batch["input_ids"]
    eligible = (
        batch["labels"] != IGNORED_LABEL
        if "labels" in batch
        else torch.ones_like(ids, dtype=torch.bool)
    )
    chosen = (torch.rand(ids.shape, generator=generator) < _CHOSEN) & eligible
    fate = torch.rand(ids.shape, generator=generator)
    candidates = ids[eligible]
    replacements = candidates[torch.randint(len(candidates), ids.shape, generator=generator)]
    shown = ids.masked_fill(chosen & (fate < _HIDDEN), mask_id)
    shown = torch.where(chosen & (fate >= _HIDDEN_OR_UNCHANGED), replacements, shown)
    made = type(batch)(batch)
    made |= {"input_ids": shown, "labels": ids.masked_fill(~chosen, IGNORED_LABEL)}
    return made
