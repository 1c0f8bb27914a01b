"""What several processes agree on, and who they must be."""

import dataclasses

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.layout import Layout
from autofit.distributed import Ranks
from tests.ranks import on_ranks

HYBRID = Layout(replicate=2, shard=2)


def agreed() -> tuple[object, ...]:
    ranks = Ranks.of(HYBRID, torch.device("cpu"))
    ones = ranks.sum_of(torch.ones(2))
    assert ranks.mesh is not None
    return (
        ranks.rank,
        ranks.dp_rank,
        ranks.sums(ranks.rank, 1),
        ranks.largest(ranks.rank),
        ones.tolist(),
        ranks.mesh.shape,
    )


def test_all_know_the_same_numbers() -> None:
    answers = on_ranks(4, agreed)
    assert [answer[:2] for answer in answers] == [(rank, rank) for rank in range(4)]
    assert {answer[2:] == ((6.0, 4.0), (3.0,), [4.0, 4.0], (2, 2)) for answer in answers} == {True}


def alike() -> tuple[object, ...]:
    ranks = Ranks.of(Layout(context=2, tensor=2), torch.device("cpu"))
    assert ranks.mesh is not None
    assert ranks.context is not None
    return (
        ranks.dp_rank,
        ranks.sums(3),
        ranks.mesh.shape,
        torch.distributed.get_process_group_ranks(ranks.context),
    )


def test_ranks_that_see_the_same_samples_count_them_once() -> None:
    answers = on_ranks(4, alike)
    assert {answer[:3] for answer in answers} == {(0, (3.0,), (1, 2, 2))}
    assert [answer[3] for answer in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_one_device_needs_no_others() -> None:
    ranks = Ranks.of(Layout(), torch.device("cpu"))
    assert not ranks.are_several
    assert ranks.sums(3, 4.5) == (3, 4.5)
    assert ranks.largest(2) == (2,)
    value = torch.ones(1)
    assert ranks.sum_of(value) is value


def test_too_few_processes_are_told() -> None:
    with pytest.raises(InputError, match="trains on 4 devices, and 1 process is running") as told:
        Ranks.of(HYBRID, torch.device("cpu"))
    assert "torchrun --nproc-per-node 4" in told.value.remedy


def test_ranks_that_hold_parts_of_the_same_samples_share_a_part_of_the_batch() -> None:
    layout = Layout(replicate=2, shard=1, context=1, tensor=2)
    dp_ranks = [dataclasses.replace(Ranks(layout), rank=rank).dp_rank for rank in range(4)]
    assert dp_ranks == [0, 0, 1, 1]
