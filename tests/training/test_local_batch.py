"""Each rank reads its own samples, once, in the order of one device."""

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from autofit.core.layout import Layout
from autofit.distributed import Ranks
from autofit.training import random_state
from autofit.training.local_batch import LocalBatch, local_loader
from tests.ranks import on_ranks

SAMPLES, BATCH = 22, 8  # the last batch holds 6


class Counted(Dataset[torch.Tensor]):
    """Numbers, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        torch.rand(1)  # an augmentation
        return torch.tensor(float(index))


def shuffled(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(data, BATCH, shuffle=True)


def weighted(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(
        data, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
    )


def dropping(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(data, BATCH, drop_last=True)


def passes(loader: Any) -> list[list[Any]]:
    """Two passes, the second in another order."""
    found = []
    for seed in range(2):
        random_state.seed_host(seed)
        found.append(list(loader))
    return found


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("kind", [shuffled, weighted, dropping])
def test_the_parts_are_the_batches_and_no_sample_is_read_twice(
    kind: Callable[[Any], Any], parts: int
) -> None:
    expected = passes(kind(Counted()))
    found, read = [], list[int]()
    for rank in range(parts):
        data = Counted()
        loader = local_loader(kind(data), Ranks(Layout(shard=parts), rank))
        assert len(loader) == len(expected[0])
        found.append(passes(loader))
        read += data.read
    assert len(read) == sum(len(batch) for batches in expected for batch in batches)
    for number, batches in enumerate(expected):
        for step, batch in enumerate(batches):
            of_ranks: list[LocalBatch] = [each[number][step] for each in found]
            assert torch.equal(torch.cat([each.batch for each in of_ranks if each.counts]), batch)
            assert {each.samples for each in of_ranks} == {len(batch)}


@pytest.mark.parametrize("start", [0, 3, 8, 13, 21])
def test_a_pass_that_begins_within_a_batch_is_divided_again(start: int) -> None:
    (whole,) = passes(shuffled(Counted()))[:1]
    found, read = [], list[int]()
    for rank in range(2):
        data = Counted()
        loader = local_loader(shuffled(data), Ranks(Layout(shard=2), rank))
        random_state.seed_host(0)
        found.append(list(loader.batches_from(start)))
        read += data.read
    seen = [
        torch.cat([part.batch for part in parts if part.counts])
        for parts in zip(*found, strict=True)
    ]
    assert torch.equal(torch.cat(seen), torch.cat(whole)[start:])
    assert [parts[0].samples for parts in zip(*found, strict=True)] == [
        len(batch) for batch in seen
    ]
    # what was seen before is not read; a rank without any reads one
    assert len(read) <= SAMPLES - start + 1


def test_a_rank_without_samples_holds_one_that_does_not_count() -> None:
    loader = local_loader(DataLoader(Counted(), 21), Ranks(Layout(shard=2), 1))
    assert [(len(each.batch), each.counts, each.samples) for each in loader] == [
        (10, True, 21),
        (1, False, 1),
    ]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


@pytest.mark.parametrize("parts", [2, 3])
def test_the_size_of_the_largest_part_is_known_unless_samples_may_be_left_out(parts: int) -> None:
    ranks = [Ranks(Layout(shard=parts), rank) for rank in range(parts)]
    found = [list(local_loader(DataLoader(Counted(), BATCH), each)) for each in ranks]
    for step in zip(*found, strict=True):
        assert {each.largest for each in step} == {max(len(each.batch) for each in step)}
    filtering = DataLoader(
        Counted(), BATCH, collate_fn=lambda samples: torch.stack(samples[:-1] or samples)
    )
    assert {each.largest for each in local_loader(filtering, ranks[0])} == {None}


def test_what_only_reads_as_a_whole_is_left_as_it_is() -> None:
    several = Ranks(Layout(shard=2), 1)
    own_order = DataLoader(Counted(), batch_sampler=[[0, 1], [2]])
    for loader in ([torch.ones(2)], DataLoader(Endless(), 2), own_order):
        assert local_loader(loader, several) is loader
    alone = shuffled(Counted())
    assert local_loader(alone, Ranks()) is alone
    assert local_loader(alone, Ranks(Layout(tensor=2), 1)) is alone, (
        "all ranks of a group need the same samples"
    )


def streamed() -> list[tuple[list[int], bool, int]]:
    """Eleven samples in batches of four, on this rank."""
    data = (
        datasets.Dataset.from_dict({"x": list(range(11))})
        .to_iterable_dataset()
        .with_format("torch")
    )
    loader = local_loader(DataLoader(data, 4), Ranks(Layout(shard=2), torch.distributed.get_rank()))
    return [(each.batch["x"].tolist(), each.counts, each.samples) for each in loader]


def test_streams_are_split_by_their_own_library() -> None:
    first, second = on_ranks(2, streamed)
    assert first == [([0, 2], True, 4), ([4, 6], True, 4), ([8, 10], True, 3)]
    assert second == [([1, 3], True, 4), ([5, 7], True, 4), ([9], True, 3)]
