"""Weights that not every loss reaches, under ways of averaging gradients over ranks."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.setup.sharding import may_skip
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests import tiny
from tests.ranks import on_ranks

DDP, FSDP = {"data_parallel": "ddp"}, {"data_parallel": "fsdp"}
EXACT = 2e-6


class Choosing(nn.Module):
    """A layer that no loss reaches, one that only some samples go through, and one whose output no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.unused, self.sometimes, self.beside = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(features)
        if features[0, 0] > 0:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden), self.beside(hidden)


def some_go_through(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of four samples the first two, which are the first rank's."""
    generator = torch.Generator().manual_seed(samples)
    features = torch.randn(samples, 8, generator=generator)
    features[:, 0] = torch.where(torch.arange(samples) < 2, 1.0, -1.0)
    return features, torch.randint(4, (samples,), generator=generator)


def choosing() -> Workload:
    loss = lambda model, batch: functional.cross_entropy(model(batch[0])[0], batch[1])  # noqa: E731
    return Workload(Choosing, some_go_through, effective_batch_size=4, loss=loss)


class _Llama:
    """transformers' own class, with a layer that nothing calls."""

    def __call__(self) -> nn.Module:
        model = tiny.llama()()
        model.unused = nn.Linear(4, 4)
        return model


def with_a_spare_layer() -> Workload:
    return dataclasses.replace(tiny.llama_workload(), model=_Llama())


def trained(make: Callable[[], Workload], knobs: Mapping[str, Any], world: int) -> tuple[list[float], list[bool]]:
    """The losses of three steps, and which weights have moved; those of all ranks are compared."""
    hardware = dataclasses.replace(tiny.CPU, devices=world)
    setup = build(make(), knobs, hardware, hyperparameters=Hyperparameters(lr=1e-2, weight_decay=0.1))
    before = [_whole(parameter).clone() for parameter in setup.model.parameters()]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        own, _ = own_samples(setup.workload.batch(4), setup.ranks.sampler, setup.ranks.layout.samplers)
        losses.append(float(accumulate(setup, own)))
        update(setup)
    after = [_whole(parameter) for parameter in setup.model.parameters()]
    for weight in after:
        mean = setup.ranks.sum_of(weight.clone()) / world
        torch.testing.assert_close(mean, weight, rtol=0, atol=1e-7)
    return losses, [not torch.equal(*pair) for pair in zip(before, after, strict=True)]


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("make", [choosing, with_a_spare_layer])
def test_weights_that_not_every_loss_reaches(make: Callable[[], Workload], parallel: dict[str, Any]) -> None:
    knobs = {"micro_batch_size": 1}
    ((losses, moved),) = on_ranks(1, trained, make, knobs, 1)
    assert not all(moved)
    assert any(moved)
    for found in on_ranks(2, trained, make, knobs | parallel, 2):
        assert found == (pytest.approx(losses, abs=EXACT), moved)


class _Collectives(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def counted(knobs: Mapping[str, Any], world: int, key: str) -> int:
    """The collectives of a kind in one step."""
    setup = build(tiny.llama_workload(8), knobs, dataclasses.replace(tiny.CPU, devices=world))
    own, _ = own_samples(setup.workload.batch(8), setup.ranks.sampler, setup.ranks.layout.samplers)
    with _Collectives() as collectives:
        accumulate(setup, own)
    return collectives.counts[key]


SCATTER = "_reduce_scatter_base_"


@pytest.mark.parametrize(
    ("knobs", "world", "key", "of_two", "of_one"),
    [
        (FSDP, 2, SCATTER, 10, 5),
        (FSDP | {"lora_rank": 4}, 2, SCATTER, 2, 2),
        (FSDP | {"data_parallel_replicate": 2}, 4, "allreduce_", 3 + 5, 3 + 5),
        (DDP, 2, "allreduce_", 3 + 1, 3 + 1),
    ],
)
def test_adapters_and_replicas_reduce_in_the_last_micro_batch(
    knobs: dict[str, Any], world: int, key: str, of_two: int, of_one: int
) -> None:
    """Two blocks, two ends and the root; three all-reduces agree on counts and the loss."""
    size = 8 // world
    for micro_batch_size, expected in ((size // 2, of_two), (size, of_one)):
        found = on_ranks(world, counted, knobs | {"micro_batch_size": micro_batch_size}, world, key)
        assert found == [expected] * world


def test_only_models_whose_codemay_skip_weights_have_the_graph_walked() -> None:
    assert may_skip(Choosing())
    assert not may_skip(tiny.llama()())
    assert not any(may_skip(tiny.mixture_workload(kind).model()) for kind in tiny.MIXTURES)
