"""Stages of a pipeline learn what one device learns: three steps of uneven labels, clipped, losses compared.

The cases of a number of ranks run one after the other in the same processes: starting them takes longer than training.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters
from autofit.data.batch import own_samples
from autofit.training.build import build
from autofit.training.evaluation import EvaluationPlan, check_evaluation
from autofit.training.local_batch import LocalBatch
from autofit.training.pipeline_cut import balanced
from autofit.training.step import accumulate, update
from tests.ranks import on_ranks
from tests.tiny import CPU
from tests.tolerances import LOSS, LOSS_OF_16_BITS_IN_LARGE_STEPS
from tests.training.test_several_ranks import RATE, STEPS, batch_of
from tests.training.test_tensor_and_context_ranks import Case, every, workload_of

PIPELINE = {"pipeline_parallel": 2, "micro_batch_size": 3}
FSDP = {"data_parallel": "fsdp"}
LORA = {"lora_rank": 4}
FULL = {"activation_checkpointing": "full"}

LEARNS: dict[int, dict[Case, dict[str, Any]]] = {
    2: {
        ("llama", "1f1b"): PIPELINE,
        ("llama", "gpipe"): PIPELINE | {"pipeline_schedule": "gpipe"},
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
        ("qwen3", "gathered weights stay"): PIPELINE | FULL | {"reshard_after_forward": False},
    },
}
REFUSED: dict[Case, tuple[dict[str, Any], str]] = {
    ("gpt2", "stages and tensors"): (PIPELINE | {"tensor_parallel": 2}, "use tensor_parallel 1"),
    ("gpt2", "too many"): (PIPELINE | {"pipeline_parallel": 4}, "has 2 blocks, fewer than 4"),
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
    """What one device finds, without what only several have."""
    kept = ("micro_batch_size", "precision", "loss", "lora_rank", "optimizer")
    cases = {}
    for of_world in LEARNS.values():
        for case, knobs in of_world.items():
            cases[case] = (case[0], {knob: knobs[knob] for knob in kept if knob in knobs})
    (answers,) = on_ranks(1, every, list(cases.values()), 1)
    return dict(zip(cases, answers, strict=True))


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in LEARNS.items() for case in cases]
)
def test_it_learns_what_one_device_learns(world: int, case: Case) -> None:
    tolerance = LOSS_OF_16_BITS_IN_LARGE_STEPS if "mixed" in case[1] else LOSS
    expected, expected_beside = alone()[case]
    for answer in found(world)[case]:
        assert type(answer) is tuple, answer
        assert answer[0] == pytest.approx(expected, abs=tolerance, rel=0)
        assert answer[1] == pytest.approx(expected_beside, abs=5 * tolerance, rel=0)  # a norm, too


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
    setup.close()

    after = dict(model.named_parameters())
    same = [
        [type(module) for module in model.modules()] == kinds,
        [set(vars(module)) for module in model.modules()] == attributes,
        after.keys() == parameters.keys(),
        all(after[name] is parameters[name] for name in after),
    ]
    return same, [float(weight.detach().double().sum()) for weight in after.values()]


@pytest.mark.parametrize(("world", "knobs"), [(2, PIPELINE), (4, PIPELINE | FSDP)])
def test_a_model_comes_back_whole_and_trained(world: int, knobs: dict[str, Any]) -> None:
    """On every rank, with the values that one device trains from the first rank's weights."""
    ((_, expected),) = on_ranks(1, returned, {"micro_batch_size": 3}, 1)
    for same, sums in on_ranks(world, returned, knobs, world):
        assert same == [True] * 4
        assert sums == pytest.approx(expected, abs=1e-4)


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


@pytest.mark.parametrize(
    ("work", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1 + 2], 2, [0, 3, 4]),  # with a head
        ([1, 1, 1], 2, [0, 1, 3]),  # earlier parts are smaller
        ([5, 1, 1, 1], 3, [0, 1, 2, 4]),
        ([1, 1, 1], 3, [0, 1, 2, 3]),
    ],
)
def test_the_largest_part_is_as_small_as_can_be(
    work: list[int], parts: int, cuts: list[int]
) -> None:
    assert balanced(work, parts) == cuts
