"""What ranks share: weights, gradients that not every loss reaches, statistics; in float64 to the last digits."""

import copy
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.errors import InputError, RefusedError
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.setup.host_copies import CopyLane
from autofit.setup.saved_tensors import SavedTensorsOnHost
from autofit.setup.sharding import NEW_ENOUGH, may_skip
from autofit.techniques import precision
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests import tiny
from tests.ranks import on_ranks
from tests.tolerances import LOSS, LOSS_OF_16_BITS

DDP, FSDP = {"data_parallel": "ddp"}, {"data_parallel": "fsdp"}
ZERO_2 = FSDP | {"reshard_after_forward": False}


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


def trained(
    make: Callable[[], Workload], knobs: Mapping[str, Any], world: int
) -> tuple[list[float], list[bool]]:
    """The losses of three steps, and which weights have moved; those of all ranks are compared."""
    hardware = dataclasses.replace(tiny.CPU, devices=world)
    setup = build(
        make(), knobs, hardware, hyperparameters=Hyperparameters(lr=1e-2, weight_decay=0.1)
    )
    before = [_whole(parameter).clone() for parameter in setup.model.parameters()]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        own, _ = own_samples(
            setup.workload.batch(4), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
        )
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
def test_weights_that_not_every_loss_reaches(
    make: Callable[[], Workload], parallel: dict[str, Any]
) -> None:
    if make is choosing and parallel is FSDP and not NEW_ENOUGH:
        pytest.skip(
            "before PyTorch 2.13, fsdp cannot add up gradients of other weights on each rank"
        )
    knobs = {"micro_batch_size": 1}
    ((losses, moved),) = on_ranks(1, trained, make, knobs, 1)
    assert not all(moved)
    assert any(moved)
    for found in on_ranks(2, trained, make, knobs | parallel, 2):
        assert found == (pytest.approx(losses, abs=LOSS), moved)


class _Towers:
    """A Llama with blocks that none of its samples goes through."""

    def __call__(self) -> nn.Module:
        model = tiny.llama()()
        model.tower = copy.deepcopy(model.model.layers)
        return model


def with_a_spare_tower() -> Workload:
    return dataclasses.replace(tiny.llama_workload(), model=_Towers())


def test_adapters_wait_for_the_last_micro_batch_beside_blocks_that_nothing_gathers() -> None:
    knobs = {"micro_batch_size": 1, "precision": "bf16-mixed", "lora_rank": 4}
    ((losses, moved),) = on_ranks(1, trained, with_a_spare_tower, knobs, 1)
    assert any(moved)
    for found in on_ranks(2, trained, with_a_spare_tower, knobs | FSDP, 2):
        assert found == (pytest.approx(losses, abs=LOSS_OF_16_BITS), moved)


class _Collectives(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def counted(knobs: Mapping[str, Any], world: int, key: str) -> list[int]:
    """The collectives of a kind in one step of two micro-batches, and of one."""
    found = []
    for parts in (2, 1):
        size = 8 // world // parts
        hardware = dataclasses.replace(tiny.CPU, devices=world)
        setup = build(tiny.llama_workload(8), {**knobs, "micro_batch_size": size}, hardware)
        own, _ = own_samples(
            setup.workload.batch(8), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
        )
        with _Collectives() as collectives:
            accumulate(setup, own)
        found.append(collectives.counts[key])
    return found


SCATTER = "_reduce_scatter_base_"


@pytest.mark.parametrize(
    ("knobs", "world", "key", "of_two", "of_one"),
    [
        (FSDP, 2, SCATTER, 10, 5),
        (FSDP | {"lora_rank": 4}, 2, SCATTER, 2, 2),
        (FSDP | {"data_parallel_replicate": 2}, 4, "allreduce_", 1 + 5, 1 + 5),
        (DDP, 2, "allreduce_", 1 + 1, 1 + 1),
    ],
)
def test_adapters_and_replicas_reduce_in_the_last_micro_batch(
    knobs: dict[str, Any], world: int, key: str, of_two: int, of_one: int
) -> None:
    """Two blocks, two ends and the root; one all-reduce adds up the loss."""
    assert on_ranks(world, counted, knobs, world, key) == [[of_two, of_one]] * world


def test_only_models_whose_code_may_skip_weights_have_the_graph_walked() -> None:
    assert may_skip(Choosing())
    assert not may_skip(tiny.llama()())
    assert not any(may_skip(tiny.mixture_workload(kind).model()) for kind in tiny.MIXTURES)


class Wide(nn.Module):
    """Blocks with norms in float64, one of whose sizes is odd; `scaled`: and a weight without dimensions."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(())) if scaled else None
        blocks = (nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), block) for block in blocks)
        self.last = nn.Linear(8, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = features + block(features)
        logits = self.last(features)
        return logits if self.scale is None else logits * self.scale.exp()


def wide(scaled: bool) -> Workload:
    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, 8, dtype=torch.float64), torch.randint(3, (samples,))

    def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(given[0]), given[1])

    return Workload(functools.partial(Wide, scaled), batch, effective_batch_size=12, loss=loss)


IN_FLOAT64: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 1},
    "checkpointed": {"activation_checkpointing": "full", "micro_batch_size": 2},
    "sgd": {"optimizer": "sgd"},
    "foreach": {"optimizer": "adamw-foreach"},
    "lora": {"lora_rank": 2, "micro_batch_size": 1},
    "in-backward": {"optimizer_in_backward": True},
    "scaled": {"micro_batch_size": 2},
}


def in_float64(ways: tuple[dict[str, Any], ...], world: int) -> list[dict[str, list[float]]]:
    """Sums of each weight after three steps, by name of the knobs, in each way to train in parallel."""
    precision._FORMATS["fp32"] = (torch.float64, torch.float64)
    found: list[dict[str, list[float]]] = [{} for _ in ways]
    for (name, knobs), way in itertools.product(IN_FLOAT64.items(), range(len(ways))):
        if name == "in-backward" and ways[way] == DDP:
            continue
        # weights that stay gathered: what computes again, adds up or steps in between
        if name in ("sgd", "foreach", "scaled") and ways[way] == ZERO_2:
            continue
        settings = Hyperparameters(
            lr=1e-2, weight_decay=0.1, max_grad_norm=None if name == "in-backward" else 0.1
        )
        hardware = dataclasses.replace(tiny.CPU, devices=world)
        setup = build(wide(name == "scaled"), knobs | ways[way], hardware, hyperparameters=settings)
        for step in range(3):
            torch.manual_seed(step)
            own, _ = own_samples(
                setup.workload.batch(12), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
            )
            accumulate(setup, own)
            update(setup)
        setup.close()
        found[way][name] = [
            float(parameter.detach().abs().sum()) for parameter in setup.model.parameters()
        ]
    return found


def test_weights_agree_in_float64_to_the_last_digits() -> None:
    ((expected,),) = on_ranks(1, in_float64, ({},), 1)
    for ways in on_ranks(3, in_float64, (DDP, FSDP, ZERO_2), 3):
        for sums, left_out in zip(ways, (1, 0, 3), strict=True):
            assert len(sums) == len(expected) - left_out
            for name in sums:
                assert sums[name] == pytest.approx(expected[name], rel=1e-12), name


def scales() -> list[list[float]]:
    """Of weights that are quantised when they are given, and drawn differently by each process."""
    found = []
    for parallel in (DDP, FSDP) if NEW_ENOUGH else (DDP, DDP):
        torch.manual_seed(torch.distributed.get_rank())
        model, knobs = tiny.llama()(), {"lora_rank": 4, "quantization": "nf4"}
        setup = build(
            tiny.llama_workload(),
            knobs | parallel,
            dataclasses.replace(tiny.CPU, devices=2),
            model=model,
        )
        states = [
            module.quant_state for module in setup.model.modules() if hasattr(module, "quant_state")
        ]
        found.append([float(state.absmax.sum()) for state in states])
    return found


def test_given_weights_are_made_one_before_they_are_quantised() -> None:
    first, second = on_ranks(2, scales)
    assert all(first)
    assert first == second


def statistics() -> tuple[list[list[float]], float]:
    """The running ones after a step on other samples, and a random number."""
    found = []
    for parallel in (DDP, FSDP):
        setup = build(tiny.conv_workload(), parallel, dataclasses.replace(tiny.CPU, devices=2))
        accumulate(setup, own_samples(setup.workload.batch(4), setup.ranks.dp_rank, 2)[0])
        assert any("BatchNorm" in warning for warning in setup.warnings)
        found += [buffer.flatten().tolist() for buffer in setup.model.buffers()]
    return found, float(torch.rand(()))


def test_running_statistics_are_those_of_all_ranks_and_random_numbers_are_not() -> None:
    (first, drawn), (second, other) = on_ranks(2, statistics)
    assert first == second
    assert drawn != other


def failing() -> str:
    """What a rank tells of a build that fails on the last one alone."""

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        if torch.distributed.get_rank():
            raise ValueError("not here")
        return torch.optim.SGD(groups, lr=0.1)

    workload = dataclasses.replace(tiny.llama_workload(), optimizer=optimizer)
    try:
        build(workload, FSDP, dataclasses.replace(tiny.CPU, devices=2))
    except InputError as error:
        return str(error)
    time.sleep(2)
    return "built"


def test_a_rank_whose_build_fails_waits_for_nobody() -> None:
    assert on_ranks(2, failing) == [
        "built",
        "the optimizer function raised ValueError: not here. Correct it.",
    ]


def offloaded(knobs: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
    """Beside each way to train in parallel: the bytes that move to the host, and the losses of two steps."""
    found = []
    for parallel in (DDP, FSDP, ZERO_2):
        setup = build(
            tiny.llama_workload(), {**knobs, **parallel}, dataclasses.replace(tiny.CPU, devices=2)
        )
        offload = SavedTensorsOnHost(setup.model, CopyLane(None), smallest=256, window=4096)
        setup.forward_contexts.append(offload.hooks)
        torch.manual_seed(0)
        own, _ = own_samples(setup.workload.batch(4), setup.ranks.dp_rank, 2)
        losses = []
        for _ in range(2):
            losses.append(float(accumulate(setup, own)))
            update(setup)
        found.append((offload.packed_bytes, losses))
    return found


@pytest.mark.parametrize(
    "knobs", [{}, {"precision": "bf16-mixed"}, {"lora_rank": 4}], ids=["", "mixed", "lora"]
)
def test_gathered_weights_do_not_move_to_the_host_with_activations(knobs: dict[str, Any]) -> None:
    for (plain, expected), *others in on_ranks(2, offloaded, knobs):
        for found, losses in others:
            assert 0 < found <= plain
            assert losses == pytest.approx(
                expected, abs=LOSS_OF_16_BITS if "precision" in knobs else LOSS
            )


class Reading(tiny.Transformer):
    """Its blocks are not called, so that no hook of theirs runs."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block.forward(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


class Scaled(tiny.Transformer):
    """It has a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Staged(tiny.Transformer):
    """Its blocks stand in lists of a list."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.blocks = nn.ModuleList(
            nn.ModuleList(self.blocks[start : start + 2]) for start in (0, 2)
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for stage in self.blocks:
            for block in stage:
                hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


def tried() -> list[str]:
    """What is said of each model, or the number of its groups."""
    said = []
    for model in (Reading, Scaled, Staged):
        workload = dataclasses.replace(tiny.transformer_workload(), model=model)
        try:
            knobs = FSDP | {"optimizer_in_backward": model is Scaled}
            setup = build(workload, knobs, dataclasses.replace(tiny.CPU, devices=2))
            accumulate(setup, workload.batch(2))
            said.append(
                str(sum(isinstance(module, FSDPModule) for module in setup.model.modules()))
            )
        except RefusedError as error:
            said.append(str(error))
    return said


def test_blocks_that_are_not_called_and_weights_without_rows_are_refused_in_a_sentence() -> None:
    reading, scaled, staged = on_ranks(2, tried)[0]
    assert "whose code computes with weights of layers that it does not call; use ddp." in reading
    assert "do not know a weight without rows" in scaled
    assert staged == "5"  # four blocks and the root
