"""Stages of a pipeline learn what one device learns: three steps of uneven labels, clipped, losses compared.

The cases of a number of ranks run one after the other in the same processes: starting them takes longer than training.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from autofit.core.errors import InputError, RefusedError
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.setup.host_copies import CopyLane
from autofit.setup.streamed_blocks import BlockStreamer
from autofit.techniques import precision, technique_named
from autofit.training.build import build
from autofit.training.evaluation import EvaluationPlan, check_evaluation
from autofit.training.local_batch import LocalBatch
from autofit.training.step import accumulate, loss_value, update
from tests.ranks import on_ranks
from tests.tiny import CPU, mlp_workload
from tests.training.test_several_ranks import BATCH, RATE, STEPS, batch_of
from tests.training.test_tensor_and_context_ranks import (
    Case,
    assert_learnt_alike,
    every,
    on_one_device,
    workload_of,
)

PIPELINE = {"pipeline_parallel": 2, "micro_batch_size": 3}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
FSDP = {"data_parallel": "fsdp"}
LORA = {"lora_rank": 4}
FULL = {"activation_checkpointing": "full"}

LEARNS: dict[int, dict[Case, dict[str, Any]]] = {
    2: {
        ("llama", "1f1b"): PIPELINE,
        ("llama", "gpipe"): PIPELINE | {"pipeline_schedule": "gpipe"},
        ("deep", "interleaved"): PIPELINE | INTERLEAVED,
        ("deep", "interleaved, checkpointed"): PIPELINE | INTERLEAVED | FULL | LORA,
        ("llama", "one micro-batch"): PIPELINE | {"micro_batch_size": 12},
        ("llama", "mixed"): PIPELINE | {"precision": "bf16-mixed"},
        ("llama", "adapters"): PIPELINE | LORA,
        ("llama", "chunked"): PIPELINE | {"loss": "chunked"},
        ("qwen3", "checkpointed"): PIPELINE | FULL,
        ("tied", "8 bits"): PIPELINE | {"optimizer": "adamw-8bit"},
        ("padding", "1f1b"): PIPELINE,
        ("scaled", "1f1b"): PIPELINE,
        ("gpt2", "1f1b"): PIPELINE,
        ("mamba", "1f1b"): PIPELINE,
        ("mixture", "1f1b"): PIPELINE,
    },
    4: {
        ("tied", "shards"): PIPELINE | FSDP,
        ("tied", "replicas"): PIPELINE | {"data_parallel": "ddp"},
        ("llama", "shards, mixed"): PIPELINE | FSDP | {"precision": "bf16-mixed"},
        ("llama", "shards of adapters"): PIPELINE | FSDP | LORA,
        ("deep", "interleaved shards"): PIPELINE | INTERLEAVED | FSDP,
        ("deep", "interleaved replicas"): PIPELINE | INTERLEAVED | {"data_parallel": "ddp"} | LORA,
        ("deep", "interleaved shards of adapters"): PIPELINE | INTERLEAVED | FSDP | LORA,
        ("qwen3", "gathered weights stay"): PIPELINE | FULL | {"reshard_after_forward": False},
    },
}
REFUSED: dict[Case, tuple[dict[str, Any], str]] = {
    ("gpt2", "stages and tensors"): (PIPELINE | {"tensor_parallel": 2}, "use tensor_parallel 1"),
    ("gpt2", "too many"): (PIPELINE | {"pipeline_parallel": 4}, "has 2 repeated blocks, fewer"),
    ("gpt2", "in backward"): (
        {"pipeline_parallel": 2, "optimizer_in_backward": True, "data_parallel": "fsdp"},
        "a pipeline needs several micro-batches",
    ),
}


@functools.cache
def found(world: int) -> dict[Case, list[Any]]:
    """What each rank finds, by case."""
    cases = {case: (case[0], knobs) for case, knobs in LEARNS[world].items()}
    if world == 4:
        cases |= {case: (case[0], knobs) for case, (knobs, _) in REFUSED.items()}
    answers = on_ranks(world, every, list(cases.values()), world)
    return dict(zip(cases, map(list, zip(*answers, strict=True)), strict=True))


@functools.cache
def alone() -> dict[Case, Any]:
    return on_one_device(LEARNS)


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in LEARNS.items() for case in cases]
)
def test_it_learns_what_one_device_learns(world: int, case: Case) -> None:
    assert_learnt_alike(case, found(world)[case], alone()[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_in_stages_is_refused(case: Case) -> None:
    _, reason = REFUSED[case]
    for answer in found(4)[case]:
        assert reason in answer


def returned(knobs: Mapping[str, Any], world: int) -> tuple[list[bool], list[float]]:
    """Whether a model given from outside comes back as it was, and the sums of its weights."""
    workload = workload_of("tied")
    torch.manual_seed(torch.distributed.get_rank())  # ranks start from other weights
    model = workload.model()
    kinds = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    parameters = dict(model.named_parameters())

    hardware = dataclasses.replace(CPU, devices=world)
    setup = build(workload, knobs, hardware, model=model, hyperparameters=Hyperparameters(lr=RATE))
    layout = setup.ranks.layout
    for step in range(STEPS):
        batch = batch_of(workload, step)
        own, counts = own_samples(batch, setup.ranks.dp_rank, layout.dp_degree)
        accumulate(setup, LocalBatch(own, counts))
        update(setup)
    sharded = [module for module in setup.model.modules() if isinstance(module, FSDPModule)]
    roots = [module for module in sharded if module._get_fsdp_state()._is_root]
    setup.close()

    after = dict(model.named_parameters())
    same = [
        [type(module) for module in model.modules()] == kinds,
        [set(vars(module)) for module in model.modules()] == attributes,
        after.keys() == parameters.keys(),
        all(after[name] is parameters[name] for name in after),
        len(roots) <= 1,  # of others FSDP gathers nothing ahead
    ]
    return same, [float(weight.detach().double().sum()) for weight in after.values()]


@pytest.mark.parametrize(("world", "knobs"), [(2, PIPELINE), (4, PIPELINE | FSDP)])
def test_a_model_comes_back_whole_and_trained(world: int, knobs: dict[str, Any]) -> None:
    """On every rank, with the values that one device trains from the first rank's weights."""
    ((_, expected),) = on_ranks(1, returned, {"micro_batch_size": 3}, 1)
    for same, sums in on_ranks(world, returned, knobs, world):
        assert same == [True] * 5
        assert sums == pytest.approx(expected, abs=1e-4)


class Own(nn.Module):
    """A model of one's own, with a weight that both its ends use where `shares` says so."""

    def __init__(self, shares: bool = False, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 3)
        self.shares = shares

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if self.shares:
            hidden = hidden + self.first.bias  # which the last stage does not hold
        return self.last(hidden)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["classes"])


def own_batch(samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return {"inputs": inputs, "classes": torch.arange(samples) % 3}


def own_losses(knobs: Mapping[str, Any], world: int, **options: Any) -> list[float] | str:
    """Losses after each of three steps in 64 bits, the last one of fewer samples; or why not."""
    workload = Workload(
        functools.partial(Own, **options),
        own_batch,
        effective_batch_size=BATCH,
        loss=own_loss,
    )
    hardware = dataclasses.replace(CPU, devices=world)
    in_64_bits = {**precision._FORMATS, "fp32": (torch.float64, torch.float64)}

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "_FORMATS", in_64_bits)
        setup = build(workload, knobs, hardware, hyperparameters=Hyperparameters(lr=RATE))
        try:
            for samples in (BATCH, BATCH, 3):
                batch, counts = own_samples(
                    own_batch(samples),
                    setup.ranks.dp_rank,
                    setup.ranks.layout.dp_degree,
                )
                accumulate(setup, LocalBatch(batch, counts))
                update(setup)
                found.append(loss_value(setup, own_batch(BATCH)))
        except (RefusedError, RuntimeError) as error:  # the other stage has lost its peer
            return str(error)
        finally:
            setup.close()

    return found


@pytest.mark.parametrize(("world", "knobs"), [(2, PIPELINE), (4, PIPELINE | FSDP)])
def test_a_module_of_ones_own_learns_the_same_in_64_bits(world: int, knobs: dict[str, Any]) -> None:
    (expected,) = on_ranks(1, own_losses, {"micro_batch_size": 3}, 1)
    for losses in on_ranks(world, own_losses, knobs, world):
        assert losses == pytest.approx(expected, abs=1e-12, rel=0)


def own_losses_of_shared(schedule: str, world: int) -> tuple[list[float] | str, list[str]]:
    """What it says, and what PyTorch's schedules log."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(schedules.__name__)
    logger.addHandler(handler)
    try:
        knobs = {**PIPELINE, "pipeline_schedule": schedule}
        return own_losses(knobs, world, shares=True), logged
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_weight_of_another_stage_is_refused_in_a_sentence(schedule: str) -> None:
    answers = on_ranks(2, own_losses_of_shared, schedule, 2)
    assert any("uses weights on a stage that does not hold them" in each for each, _ in answers)
    assert not any(logged for _, logged in answers)


def streamed(value: str, world: int) -> tuple[Any, list[int]]:
    """As `own_losses` of adapters; beside them how many blocks each stage streams."""
    counts = []
    start = BlockStreamer.__init__

    def noted(streamer: BlockStreamer, *args: Any, **options: Any) -> None:
        start(streamer, *args, **options)
        counts.append(len(streamer.blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(technique_named("parameter_offload"), "refuse", lambda *_: None)
        patch.setattr(CopyLane, "of", lambda device: CopyLane(None))
        patch.setattr(BlockStreamer, "__init__", noted)
        knobs = {"micro_batch_size": 3, **LORA, "parameter_offload": value}
        if world > 1:
            knobs |= PIPELINE
        losses = own_losses(knobs, world, width=384, depth=8)

    return losses, counts


@pytest.mark.parametrize(("value", "blocks"), [("cpu:3", 3), ("cpu", 4)])
def test_blocks_of_each_stage_rest_on_the_host(value: str, blocks: int) -> None:
    ((expected, _),) = on_ranks(1, streamed, "none", 1)
    for losses, counts in on_ranks(2, streamed, value, 2):
        assert losses == pytest.approx(expected, abs=1e-12, rel=0)
        assert counts == [blocks]


def refused_with_sums_outside_blocks(world: int) -> str:
    """Of a model that adds what a block gives to what it was given."""
    with pytest.raises(RefusedError) as refused:
        build(mlp_workload(BATCH), PIPELINE, dataclasses.replace(CPU, devices=world))
    return str(refused.value)


def test_a_model_that_adds_around_its_blocks_is_refused_in_a_sentence() -> None:
    for said in on_ranks(2, refused_with_sums_outside_blocks, 2):
        assert said.startswith("pipeline_parallel: MLP changes what one block passes on")


def evaluated(world: int) -> str:
    """What is said to a metric of outputs."""
    workload = workload_of("llama")
    setup = build(workload, PIPELINE, dataclasses.replace(CPU, devices=world))
    plan = EvaluationPlan([batch_of(workload, 0)], metrics={"size": lambda outputs, batch: 0.0})
    try:
        check_evaluation(setup, plan)
    except InputError as error:
        return str(error)
    return ""


def test_metrics_of_outputs_are_refused_on_every_stage() -> None:
    for said in on_ranks(2, evaluated, 2):
        assert "Give metrics of (model, loader)" in said
