"""Samples in memory or in files, and the loader that batches them: shuffled for training, in order
for evaluation."""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.core.errors import is_whole, pluralize, shown
from autofit.core.workload import Rows
from autofit.data.options import IGNORED_LABEL
from autofit.data.token_files import Tokens, largest

# BERT's masking (Devlin et al. 2018, section 3.1): 15 % of all tokens are to be predicted. Of those
# 80 % are hidden, 10 % stay as they are, and 10 % are replaced.
_CHOSEN = 0.15
_HIDDEN = 0.8
_HIDDEN_OR_UNCHANGED = 0.9

_MOST_SEED = 2**62
_LOOKED_AT = 2**20  # tokens whose labels are looked at at once
# The same tokens are hidden in every evaluation, so that losses can be compared.
_EVALUATION_SEED = 0


Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """What a loader batches."""

    def __len__(self) -> int: ...

    def batch(self, chosen: torch.Tensor) -> Batch:
        """The samples of these indices, as a batch."""

    def largest_id(self) -> int:
        """The largest token id; 0 where there are no tokens."""


def _pick(tensors: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> Batch:
    """These entries of dim 0 of each tensor; `chosen` are indices or a mask."""
    return {name: tensor[chosen] for name, tensor in tensors.items()}


def span_lengths(spans: torch.Tensor) -> torch.Tensor:
    """The tokens in each span, [samples], of where it begins and ends, [samples, 2]."""
    return spans[:, 1] - spans[:, 0]


def share_note(what: str, count: int, total: int) -> str:
    """A note for the user: what happened to `count` of all samples."""
    return f"{what}: {count} of {pluralize(total, 'sample')}."


@dataclass(frozen=True)
class Stacked:
    """Samples of one size, in tensors with the samples along dim 0."""

    tensors: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, chosen: torch.Tensor) -> Batch:
        return Rows(_pick(self.tensors, chosen))

    def largest_id(self) -> int:
        return int(self.tensors["input_ids"].max())


@dataclass(frozen=True)
class Packed:
    """All texts in a row, cut into sequences of one length; too few tokens for one are repeated.

    Attributes:
        tokens: `input_ids`, and `labels` where they are others; [all tokens].
        starts: of each sample among the tokens, as if they were repeated without end.
        begins: where texts begin among the tokens, in order, so that they do not see each other;
            None: each sees those before it.
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

    def batch(self, chosen: torch.Tensor) -> Batch:
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

        # The label of a text's first token would be predicted from the text before it.
        rows["labels"] = rows["labels"].masked_fill(begins == 1, IGNORED_LABEL)

        places = torch.arange(self.length).expand_as(begins)
        rows["position_ids"] = places - (places * begins).cummax(dim=1).values
        return rows

    def _sequence(self, tokens: Tokens, start: int) -> torch.Tensor:
        """The tokens from a start, repeated where they are too few."""
        found = tokens[start : start + self.length]
        if len(found) == self.length:
            return found

        repeats = math.ceil(self.length / len(found))
        return found.repeat(repeats)[: self.length]

    def _begins_within(self, start: int) -> torch.Tensor:
        """Where texts begin in the sequence from a start."""
        assert self.begins is not None, "asked only where texts do not see each other"
        stop = start + self.length
        edges = torch.tensor([start, stop])
        first, last = torch.searchsorted(self.begins, edges).tolist()
        found = self.begins[first:last] - start

        total = len(self.tokens["input_ids"])
        if total >= self.length:
            return found

        # The tokens are repeated, and so are their beginnings.
        shifts = torch.arange(0, self.length, total)
        repeated = (shifts.unsqueeze(1) + found).flatten()
        return repeated[repeated < self.length]

    def largest_id(self) -> int:
        return max(map(largest, self.tokens.values()))

    def has_labels(self, *, shifted: bool) -> torch.Tensor:
        """For each sample whether a label counts, [samples]; `shifted`: the first never does."""
        samples = len(self)
        skipped = int(shifted)
        if "labels" not in self.tokens and self.begins is None:
            return torch.full((samples,), self.length > skipped)

        found = []
        at_once = max(1, _LOOKED_AT // self.length)
        for chosen in torch.arange(samples).split(at_once):
            labels = self.batch(chosen)["labels"]
            counts = labels[:, skipped:] != IGNORED_LABEL
            found.append(counts.any(dim=1))

        return torch.cat(found)

    def only(self, mask: torch.Tensor) -> "Packed":
        """The samples where `mask` is true."""
        return replace(self, starts=self.starts[mask])


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, one after the other; a batch is padded to its longest one.

    Attributes:
        tokens: `input_ids`, `labels` where they are tokens, `token_type_ids`; [all tokens].
        spans: where each sample begins and ends among the tokens, [samples, 2].
        pad_id: pads input ids; labels are padded with the ignored label.
        per_sample: tensors of one value for each sample, [samples].
        label_spans: of labels that are a text of their own, [samples, 2].
    """

    tokens: Mapping[str, Tokens]
    spans: torch.Tensor
    pad_id: int
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)
    label_spans: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.spans)

    def batch(self, chosen: torch.Tensor) -> Batch:
        lengths = span_lengths(self.spans[chosen])
        places = torch.arange(int(lengths.max()))
        mask = places < lengths.unsqueeze(1)

        ids = self._padded("input_ids", chosen)
        batch = {"input_ids": ids, "attention_mask": mask.long()}
        for name in self.tokens:
            if name != "input_ids":
                batch[name] = self._padded(name, chosen)

        return batch | _pick(self.per_sample, chosen)

    def _padded(self, name: str, chosen: torch.Tensor) -> torch.Tensor:
        """The chosen samples' tokens of that name, padded to the longest, [samples, tokens]."""
        spans = self.spans
        padding = 0
        if name == "input_ids":
            padding = self.pad_id
        elif name == "labels":
            padding = IGNORED_LABEL
            if self.label_spans is not None:
                spans = self.label_spans

        tokens = self.tokens[name]
        sequences = [tokens[start:stop] for start, stop in spans[chosen].tolist()]
        return pad_sequence(sequences, batch_first=True, padding_value=padding).long()

    def longest(self) -> torch.Tensor:
        """The samples with the longest texts: of inputs, and of labels of their own."""
        longest = [span_lengths(self.spans).argmax()]
        if self.label_spans is not None:
            longest.append(span_lengths(self.label_spans).argmax())

        return torch.stack(longest)

    def largest_id(self) -> int:
        return max(self.pad_id, *map(largest, self.tokens.values()))

    def only(self, mask: torch.Tensor) -> "Ragged":
        """The samples where `mask` is true."""
        label_spans = self.label_spans
        if label_spans is not None:
            label_spans = label_spans[mask]

        return replace(
            self,
            spans=self.spans[mask],
            per_sample=_pick(self.per_sample, mask),
            label_spans=label_spans,
        )


@dataclass(frozen=True)
class Lengths:
    """How long the samples of a file are, in tokens, and the share of padded batches that is
    padding."""

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
        order = torch.randperm(len(lengths), generator=generator)
        drawn = lengths[order]

        held = 0
        whole = len(drawn) // batch_size
        if whole:
            batches = drawn[: whole * batch_size].reshape(whole, -1)
            held = batches.shape[1] * int(batches.amax(dim=1).sum())

        rest = drawn[whole * batch_size :]
        if len(rest):
            held += rest.numel() * int(rest.max())

        return cls(
            samples=len(lengths),
            shortest=int(lengths.min()),
            longest=int(lengths.max()),
            mean=float(lengths.double().mean()),
            padding=1 - int(lengths.sum()) / held,
        )

    def __str__(self) -> str:
        return f"samples have {self.shortest} to {self.longest} tokens, {self.mean:.0f} in the mean"


@dataclass(frozen=True)
class Twins:
    """Two texts to a sample, side by side: [samples, 2, tokens].

    Attributes:
        texts: the first text of every sample, then the second of every one.
        per_sample: tensors of one row for each sample, [samples, ...].
    """

    texts: Ragged
    per_sample: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts) // 2

    def batch(self, chosen: torch.Tensor) -> Batch:
        second = chosen + len(self)
        both = torch.stack([chosen, second], dim=1)
        texts = self.texts.batch(both.flatten())

        batch = {}
        for name, tensor in texts.items():
            batch[name] = tensor.unflatten(0, (-1, 2))
        return batch | _pick(self.per_sample, chosen)

    def with_column(self, name: str, column: torch.Tensor) -> "Twins":
        """The same with a further tensor of one row for each sample."""
        return replace(self, per_sample={**self.per_sample, name: column})

    def longest(self) -> torch.Tensor:
        """The sample with the longest text."""
        return self.texts.longest() % len(self)

    def largest_id(self) -> int:
        return self.texts.largest_id()


@dataclass(frozen=True)
class Pictures:
    """Pixels as bytes of each image, [channels, height, width], in a cache file; they are
    normalised when a batch is taken."""

    pixels: Any
    labels: torch.Tensor
    shape: tuple[int, int, int]
    mean: torch.Tensor
    deviation: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: torch.Tensor) -> Batch:
        images = []
        for index in chosen.tolist():
            buffer = self.pixels[index].as_buffer()
            images.append(np.frombuffer(buffer, np.uint8))

        values = torch.from_numpy(np.stack(images)).view(-1, *self.shape)
        values = values.float() / 255

        # By channel, for all heights and widths.
        mean = self.mean.view(-1, 1, 1)
        deviation = self.deviation.view(-1, 1, 1)
        return {
            "pixel_values": (values - mean) / deviation,
            "labels": self.labels[chosen],
        }

    def largest_id(self) -> int:
        return 0


@dataclass
class _Place:
    """How far a pass over a loader is.

    Attributes:
        seed: of the order of the pass; None before the first.
        samples: that the pass has given.
        loaded: the next pass goes on there.
    """

    seed: int | None = None
    samples: int = 0
    loaded: bool = False


@dataclass(frozen=True)
class FileLoader:
    """Batches of the effective size, each pass in a new order, as often as one likes.

    A pass draws its order from torch's global random numbers, as a DataLoader does. The beginning
    of the order fills up the last batch. Like torchdata's StatefulDataLoader it can go on where a
    pass stopped, without making the batches before.

    Attributes:
        mask_id: hides tokens at random, which become labels (masked language models).
        notes: what the user should know about how the samples were made, a sentence each.
        label_names: the numbers of classes that have names in the data.
        zeros: further arguments of the forward, zero for each token.
        ahead: make the next batch while one is used: for samples that take long.
        lengths: of samples that can be packed, before they are.
        form: the fields of the rows that were read, as "prompt+completion".
        blank: a column of the samples that is to be filled before training, [samples, ...].
    """

    samples: Samples
    batch_size: int
    mask_id: int | None = None
    notes: tuple[str, ...] = ()
    label_names: Mapping[str, int] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    ahead: bool = False
    lengths: Lengths | None = None
    form: str | None = None
    blank: torch.Tensor | None = field(default=None, compare=False)
    _place: _Place = field(default_factory=_Place, compare=False, repr=False)

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        place = self._place
        if not place.loaded or place.seed is None:
            place.seed = int(torch.randint(_MOST_SEED, ()))
            place.samples = 0
        place.loaded = False

        generator = torch.Generator().manual_seed(place.seed)
        order = self._order(generator)

        begun = place.samples // self.batch_size
        batches = self._batches(order, generator, place.samples)
        for number, batch in enumerate(batches, begun + 1):
            place.samples = number * self.batch_size
            yield batch

    def with_blank(self, name: str) -> "FileLoader":
        """The same with a column of zeros for the two texts of each sample, to be filled."""
        assert isinstance(self.samples, Twins), "only two texts have one"
        blank = torch.zeros(len(self.samples), 2)

        return replace(self, samples=self.samples.with_column(name, blank), blank=blank)

    def in_order(self) -> Iterator[Batch]:
        """Every sample once, in the file's order, without torch's global random numbers."""
        return self._batches(torch.arange(len(self.samples)), _evaluation_generator())

    def longest(self) -> Batch | None:
        """A batch of the longest samples; None where they have no length before they are made."""
        if not isinstance(self.samples, Ragged | Twins):
            return None
        return next(self._batches(self.samples.longest(), _evaluation_generator()))

    def state_dict(self) -> dict[str, int | None]:
        """The pass under way, and how many samples it gave."""
        return {"seed": self._place.seed, "samples": self._place.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that pass when the next one begins, within a batch where sizes are others now.

        Raises:
            ValueError: the state is not one that `state_dict` gives.
        """
        seed = state["seed"]
        samples = state["samples"]
        is_seed = seed is None or (is_whole(seed, 0) and seed < _MOST_SEED)
        if not is_whole(samples, 0) or not is_seed:
            raise ValueError(f"no place: {shown(dict(state))}")

        self._place.seed = seed
        self._place.samples = samples
        self._place.loaded = True

    def _order(self, generator: torch.Generator) -> torch.Tensor:
        """The samples of a pass, as many as its batches take."""
        return filled_up(torch.randperm(len(self.samples), generator=generator), self.batch_size)

    def _batches(
        self,
        order: torch.Tensor,
        generator: torch.Generator,
        samples: int = 0,
    ) -> Iterator[Batch]:
        """The batches of an order, from where so many samples were given."""
        given, begun = divmod(samples, self.batch_size)
        start = given
        if self.mask_id is not None:
            start = 0  # masking draws random numbers, so batches that were given are masked again

        def chunks() -> Iterator[torch.Tensor]:
            batches = math.ceil(len(order) / self.batch_size)
            for number in range(start, batches):
                first = number * self.batch_size
                last = first + self.batch_size
                if number == given:
                    first += begun
                yield order[first:last]

        for number, batch in enumerate(self._made(chunks()), start):
            for name in self.zeros:
                batch[name] = torch.zeros_like(batch["input_ids"])
            if self.mask_id is not None:
                batch = masked(batch, self.mask_id, generator)
            if number >= given:
                yield batch

    def _made(self, chunks: Iterator[torch.Tensor]) -> Iterator[Batch]:
        """The batch of each chunk; with `ahead`, one is made while the one before is used."""
        if not self.ahead:
            yield from map(self.samples.batch, chunks)
            return

        with ThreadPoolExecutor(1) as worker:
            coming: Future[Batch] | None = None
            for chunk in chunks:
                ready = coming
                coming = worker.submit(self.samples.batch, chunk)
                if ready:
                    yield ready.result()

            if coming:
                yield coming.result()


def filled_up(order: torch.Tensor, batch_size: int) -> torch.Tensor:
    """An order of samples, with its beginning again as far as the last batch has room."""
    total = math.ceil(len(order) / batch_size) * batch_size
    return order.repeat(math.ceil(total / len(order)))[:total]


def _evaluation_generator() -> torch.Generator:
    return torch.Generator().manual_seed(_EVALUATION_SEED)


def masked(batch: Batch, mask_id: int, generator: torch.Generator) -> Batch:
    """The batch with 15 % of the tokens to predict, and labels for those only.

    Existing labels mark the tokens that may be chosen: not padding, not the tokenizer's own.
    """
    ids = batch["input_ids"]
    eligible = torch.ones_like(ids, dtype=torch.bool)
    if "labels" in batch:
        eligible = batch["labels"] != IGNORED_LABEL

    chosen = (torch.rand(ids.shape, generator=generator) < _CHOSEN) & eligible
    fate = torch.rand(ids.shape, generator=generator)
    candidates = ids[eligible]
    replacements = candidates[torch.randint(len(candidates), ids.shape, generator=generator)]

    inputs = ids.masked_fill(chosen & (fate < _HIDDEN), mask_id)
    inputs = torch.where(chosen & (fate >= _HIDDEN_OR_UNCHANGED), replacements, inputs)

    made = type(batch)(batch)
    made["input_ids"] = inputs
    made["labels"] = ids.masked_fill(~chosen, IGNORED_LABEL)
    return made
