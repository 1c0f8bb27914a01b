"""The batch of the longest samples that a loader may give, where its data set shows their lengths.

A loader's first batches need not hold them, and a step on them must not be the first that runs out
of memory.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autofit.data.samples import FileLoader

_SECONDS = 10.0  # of reading samples; a data set may decode images
_MOST_SAMPLES = 1_000_000

Sizes = list[tuple[int, ...]]  # of each tensor of a sample


@dataclass(frozen=True)
class Longest:
    """A batch of the longest samples that were found, among so many of a data set."""

    batch: Any
    read: int
    samples: int


def longest_batch(loader: Any) -> Longest | None:
    """The longest samples of a file or of a data set that can be indexed, in a batch.

    None where the lengths are not known: of streams, of texts that are yet to become tokens, and
    where samples cannot be read or put together in this process.
    """
    if isinstance(loader, FileLoader):
        batch = loader.longest()
        samples = len(loader.samples)
        return None if batch is None else Longest(batch, samples, samples)

    is_indexable = isinstance(loader, DataLoader) and not isinstance(
        loader.dataset, IterableDataset
    )
    if not is_indexable:
        return None

    try:
        return _of_data_set(loader)
    except Exception:  # the user's own code, which perhaps works in workers alone
        return None


def _of_data_set(loader: DataLoader[Any]) -> Longest | None:
    dataset: Any = loader.dataset
    samples = len(dataset)
    end = time.monotonic() + _SECONDS
    elements: dict[int, int] = {}  # of each sample that was read
    longest: dict[tuple[int, int], tuple[int, int]] = {}  # (size, sample) by tensor and dimension

    # in no order: one that is sorted by length may take longer to read than there is time
    for sample in random.Random(0).sample(range(samples), min(samples, _MOST_SAMPLES)):
        sizes = _sizes(dataset[sample])
        if sizes is None:
            return None

        elements[sample] = sum(int(np.prod(shape)) for shape in sizes)
        for number, shape in enumerate(sizes):
            for dimension, size in enumerate(shape):
                place = (number, dimension)
                longest[place] = max(longest.get(place, (0, sample)), (size, sample))

        if time.monotonic() > end:
            break

    # Padded to the longest in each dimension; a collate_fn that packs adds them all up.
    chosen = list(dict.fromkeys(sample for _, sample in longest.values()))
    if loader.batch_size is not None:
        chosen += sorted(
            elements.keys() - set(chosen),
            key=lambda sample: -elements[sample],
        )
        chosen = chosen[: loader.batch_size]

    given = [dataset[sample] for sample in chosen]
    if loader.batch_size is None and loader.batch_sampler is None:  # each item is a batch
        given = max(
            given, key=lambda item: sum(int(np.prod(shape)) for shape in _sizes(item) or ())
        )

    return Longest(
        loader.collate_fn(given),
        len(elements),
        samples,
    )


def _sizes(sample: Any) -> Sizes | None:
    """The shapes of all that a sample holds; None where something in it is yet to get one."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return [tuple(sample.shape)]
    if isinstance(sample, int | float | np.generic | None):
        return []
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if not isinstance(sample, list | tuple):
        return None  # such as a text, or an image

    if sample and isinstance(sample[0], int | float):
        return [(len(sample),)]

    found: Sizes = []
    for item in sample:
        sizes = _sizes(item)
        if sizes is None:
            return None

        found += sizes

    return found
