"""A rank's own part of each effective batch, read alone where the loader can be asked for it.

Any loader gives all ranks the same batches in the same order, of which each rank takes its
samples. A DataLoader over a map-style dataset is asked for those alone, so that nothing is read
twice. One over an IterableDataset of the library `datasets` is split between ranks by that library,
as its samples come.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, default_collate

from autofit.data.batch import own_samples, sample_count, samples_of
from autofit.distributed import Ranks
from autofit.setup import Setup

_KEPT_OPTIONS = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


@dataclass(frozen=True)
class LocalBatch:
    """This rank's samples of an effective batch.

    Attributes:
        batch: the samples; where there are none for this rank, one that does not count.
        counts: whether they count.
        samples: of the effective batch, of all ranks.
        largest: samples of the largest local batch; None where a rank cannot know it.
    """

    batch: Any
    counts: bool = True
    samples: int = 0
    largest: int | None = None


def local_batch(setup: Setup, batch: Any) -> LocalBatch:
    """This rank's part of a batch, if it is not one already."""
    if isinstance(batch, LocalBatch):
        return batch

    ranks = setup.ranks
    cut = setup.workload.split
    parts = ranks.layout.dp_degree
    samples = sample_count(batch, cut)

    counts = True
    if parts > 1 or not samples:
        batch, counts = own_samples(batch, ranks.dp_rank, parts, cut)

    largest = None if cut else _largest(samples, ranks)
    return LocalBatch(batch, counts, samples, largest)


def _largest(samples: int, ranks: Ranks) -> int:
    """The samples of the largest local batch."""
    return -(-samples // ranks.layout.dp_degree)


def local_loader(loader: Any, ranks: Ranks) -> Any:
    """A loader of `LocalBatch`es where that saves reading; else the loader itself.

    Loaders that save their position are left as they are: each rank's would be another one.
    """
    parts = ranks.layout.dp_degree
    if parts == 1 or type(loader) is not DataLoader:
        return loader
    if callable(getattr(loader, "state_dict", None)):
        return loader

    if not isinstance(loader.dataset, IterableDataset):
        # A sampler from elsewhere may draw as it goes, from generators that differ between ranks.
        is_torchs = type(loader.sampler).__module__ == Sampler.__module__
        if is_torchs and type(loader.batch_sampler) is BatchSampler:
            return LocalIndices(loader, ranks)
        return loader

    is_of_datasets = type(loader.dataset).__module__.startswith("datasets.")
    if is_of_datasets and loader.batch_size is not None and not loader.batch_size % parts:
        return _LocalStream(loader, ranks)
    return loader


class LocalIndices:
    """The same batches of indices as the loader's, of which only this rank's are read."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks) -> None:
        # another collate_fn may leave samples out, or pack them into fewer
        keeps_all = loader.collate_fn is default_collate
        self._sampler = _LocalSampler(loader.batch_sampler, ranks, keeps_all)
        self._loader = _with(loader, batch_sampler=self._sampler)
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def batches_from(self, sample: int) -> Iterator[LocalBatch]:
        """A pass that begins at a sample, within a batch where that is so."""
        self._sampler.left_out = sample
        return iter(self)

    def __iter__(self) -> Iterator[LocalBatch]:
        pending = self._sampler.pending
        pending.clear()

        for batch in self._loader:
            yield LocalBatch(batch, *pending.popleft())


class _LocalSampler(Sampler[list[int]]):
    """This rank's indices of each batch of indices. `keeps_all`: each index becomes a sample."""

    def __init__(self, batches: Any, ranks: Ranks, keeps_all: bool) -> None:
        self._batches = batches
        self._ranks = ranks
        self._keeps_all = keeps_all
        self.left_out = 0  # samples at the front of the next pass
        # What a `LocalBatch` holds beside its samples, for each batch that is being read, in order.
        self.pending: deque[tuple[bool, int, int | None]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        rank = self._ranks.dp_rank
        left_out = self.left_out
        self.left_out = 0

        for batch in self._batches:
            indices = batch[left_out:]
            left_out = max(0, left_out - len(batch))
            if not indices:
                continue

            size = _largest(len(indices), self._ranks)
            own = indices[rank * size : (rank + 1) * size]
            largest = size if self._keeps_all else None
            self.pending.append((bool(own), len(indices), largest))
            yield own or indices[:1]


class _LocalStream:
    """Every n-th sample, or the rank's own shards, of a stream.

    Ranks end a pass together: one that has no more takes part with a sample that does not count.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks) -> None:
        from datasets.distributed import split_dataset_by_node

        self._ranks = ranks
        parts = ranks.layout.dp_degree
        own = split_dataset_by_node(loader.dataset, ranks.dp_rank, parts)
        size = (loader.batch_size or parts) // parts
        self._loader = _with(loader, dataset=own, batch_size=size)

    def __iter__(self) -> Iterator[LocalBatch]:
        spare: Any = None
        batches = iter(self._loader)

        while True:
            batch = next(batches, None)
            own = 0 if batch is None else sample_count(batch)
            samples = int(self._ranks.sums(own)[0])
            if not samples:
                return

            if spare is None:
                assert batch is not None, "a stream has a sample for each rank"
                spare = samples_of(batch, 0, 1)
            if batch is None:
                yield LocalBatch(spare, False, samples)
            else:
                yield LocalBatch(batch, True, samples)


def _with(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A DataLoader like this one, but for the changes."""
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    return DataLoader(**options | changes)
