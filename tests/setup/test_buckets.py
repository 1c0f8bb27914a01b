"""Buckets: gradients are copied into a few large tensors, of which each is added up over all ranks once."""

import dataclasses

import pytest
import torch
from torch import nn

from autofit.core.layout import Layout
from autofit.core.workload import Hyperparameters
from autofit.distributed import Ranks
from autofit.setup import Setup
from autofit.setup.buckets import bucketed
from autofit.techniques import canonicalize
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload


def step() -> tuple[list[float], int, list[bool]]:
    """(gradients after two micro-batches, how many storages they lie in, which of them are views after the first)."""
    workload, hardware = llama_workload(), dataclasses.replace(CPU, devices=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = canonicalize({"data_parallel": "ddp"}, workload, hardware)
    ranks = Ranks.of(Layout.of(config), torch.device("cpu"))
    setup = Setup(
        workload, config, hardware, torch.device("cpu"), model, Hyperparameters(), ranks=ranks
    )
    bucketed(setup, set(model.parameters()))
    after_first = []
    for last in (False, True):
        setup.exchange.sync_gradients(last)
        model(torch.full((2, 4), float(setup.ranks.rank + 1))).sum().backward()
        after_first = after_first or [bool(each.grad._is_view()) for each in model.parameters()]  # type: ignore[union-attr]
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    sums = [float(each.sum()) for each in gradients]
    storages = len({each.untyped_storage().data_ptr() for each in gradients})
    setup.close()
    model(torch.ones(2, 4)).sum().backward()
    return sums, storages, after_first


def test_gradients_of_all_ranks_are_added_up_in_one_bucket() -> None:
    (first, *found), second = on_ranks(2, step)
    assert first == pytest.approx(second[0])
    assert found == [1, [False] * 4]  # those of a first micro-batch stay where they are
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for each in (1.0, 2.0) * 2:
        model(torch.full((2, 4), each)).sum().backward()
    expected = [float(each.grad.sum()) for each in model.parameters() if each.grad is not None]
    assert first == pytest.approx(expected, rel=1e-5)  # sums in which numbers of both signs cancel
