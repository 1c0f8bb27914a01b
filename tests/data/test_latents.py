"""Latents of several sizes: each batch is of one of them, and all are seen."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.data.latents import latents_loader
from autofit.data.samples import Batch


def noise(batch: Batch, generator: torch.Generator) -> Batch:
    return {"noise": torch.randn(batch["latents"].shape, generator=generator)}


def loader_of(sizes: list[int], batch_size: int) -> Any:
    """A loader of so many samples of each size, whose latents tell which they are."""
    buckets = []
    number = 0
    for columns, samples in enumerate(sizes, 1):
        latents = torch.arange(number, number + samples).float()
        buckets.append({"latents": latents[:, None].expand(-1, columns).contiguous()})
        number += samples
    return latents_loader(buckets, batch_size, noise)


def seen(batch: Batch) -> list[int]:
    return [int(number) for number in batch["latents"][:, 0]]


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), batch_size=st.integers(1, 4))
def test_a_pass_shows_every_sample_in_whole_batches_of_one_size(
    sizes: list[int], batch_size: int
) -> None:
    loader = loader_of(sizes, batch_size)
    batches = list(loader)
    assert len(batches) == len(loader) == sum(math.ceil(size / batch_size) for size in sizes)
    assert all(len(batch["latents"]) == batch_size for batch in batches)
    shown = {number for batch in batches for number in seen(batch)}
    assert shown == set(range(sum(sizes)))

    once = [number for batch in loader.in_order() for number in seen(batch)]
    assert once == list(range(sum(sizes)))


def test_a_pass_goes_on_where_it_stopped_with_the_same_noise() -> None:
    torch.manual_seed(0)
    loader = loader_of([5, 3], 2)
    batches = iter(loader)
    first = next(batches)
    state = copy.deepcopy(loader.state_dict())
    rest = list(batches)

    again = loader_of([5, 3], 2)
    again.load_state_dict(state)
    resumed = list(again)
    assert len(resumed) == len(rest) == 4
    for there, here in zip(rest, resumed, strict=True):
        for name in there:
            torch.testing.assert_close(there[name], here[name])
    assert not any(torch.equal(first["noise"], batch["noise"]) for batch in rest)


def test_a_number_without_a_sample_is_told() -> None:
    loader = loader_of([2, 2], 1)
    with pytest.raises(IndexError):
        loader.samples.batch(torch.tensor([4]))
