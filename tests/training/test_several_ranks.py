"""Training on several ranks is training on one: three steps of uneven labels, each loss compared."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.hardware.tracker import StorageTracker
from autofit.techniques import canonicalize, refuse
from autofit.training.build import build
from autofit.training.loop import train
from autofit.training.step import accumulate, loss_value, update
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload

BATCH, STEPS, RATE = 12, 3, 1e-2
FSDP = {"data_parallel": "fsdp"}
ZERO_2 = FSDP | {"reshard_after_forward": False}
DDP = {"data_parallel": "ddp"}
HSDP = FSDP | {"data_parallel_replicate": 2}
EXACT, BF16 = 2e-6, 5e-3  # of a loss of about 4: rounding of fp32 sums, and of bf16 ones
LORA: dict[str, Any] = {"lora_rank": 4}
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 1},
    "checkpointed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective", "micro_batch_size": 2},
    "alternate": {"activation_checkpointing": "alternate"},
    "chunked": {"loss": "chunked", "micro_batch_size": 3},
    "eager": {"attention": "eager"},
    "lora": LORA,
    "lora-micro-batches": LORA | {"micro_batch_size": 2},
    "qlora": LORA | {"quantization": "nf4", "activation_checkpointing": "full"},
    "double": LORA | {"quantization": "nf4-dq"},
    "int8": LORA | {"quantization": "int8"},
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "foreach": {"optimizer": "adamw-foreach"},
    "8bit": {"optimizer": "adamw-8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "in-backward": {"optimizer_in_backward": True},
    "offloaded": {"fsdp_offload": "cpu"},
}
LOW = {"8bit": 1e-4}  # a part of less than 4096 elements has its state in fp32
ALONE: dict[str, list[float]] = {}


def workload_of(**changes: Any) -> Workload:
    return dataclasses.replace(llama_workload(**changes), effective_batch_size=BATCH)


def batch_of(workload: Workload, step: int, samples: int = BATCH) -> dict[str, torch.Tensor]:
    """Samples of uneven numbers of labels, some without any; no longer than whole ones."""
    torch.manual_seed(step)
    batch: dict[str, torch.Tensor] = workload.batch(samples)
    labels = batch["labels"].clone()
    for row in range(samples):
        labels[row, : 1 + (row * 5 + step) % 16] = -100
    return {**batch, "labels": labels}


def losses(
    knobs: Mapping[str, Any], world: int, sizes: tuple[int, ...] = (BATCH,) * STEPS, clip: bool = True, **changes: Any
) -> list[float]:
    """The loss of each step on each rank, evaluating in between."""
    workload, hardware = workload_of(**changes), dataclasses.replace(CPU, devices=world)
    setup = build(
        workload, knobs, hardware, hyperparameters=Hyperparameters(lr=RATE, max_grad_norm=1.0 if clip else None)
    )
    found = []
    for step, samples in enumerate(sizes):
        own, counts = own_samples(batch_of(workload, step, samples), setup.ranks.sampler, setup.ranks.layout.samplers)
        found.append(float(accumulate(setup, own, counts=counts)))
        assert update(setup)
        if step == 0:
            with torch.no_grad():
                loss_value(setup, batch_of(workload, 0, 1))  # a forward without a backward
    setup.close()
    return found


def alone(knobs: Mapping[str, Any], **options: Any) -> list[float]:
    key = repr((sorted(knobs.items()), options))
    if key not in ALONE:
        plain = {
            knob: value for knob, value in knobs.items() if knob not in (*HSDP, "reshard_after_forward", "fsdp_offload")
        }
        (ALONE[key],) = on_ranks(1, losses, plain, 1, *options.values())
    return ALONE[key]


@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO_2], ids=["ddp", "fsdp", "zero-2"])
@pytest.mark.parametrize("name", KNOBS)
def test_each_knob_learns_the_same_on_two_ranks(name: str, parallel: dict[str, Any]) -> None:
    knobs = KNOBS[name] | parallel
    hardware = dataclasses.replace(CPU, devices=2)
    config = canonicalize(knobs, workload_of(), hardware)
    if reason := refuse(config, workload_of(), hardware):
        assert reason.endswith("."), "a sentence"
        assert any(f" {word}" in reason for word in ("use", "leave", "choose")), reason
        assert name in ("int8", "adafactor", "in-backward", "offloaded")
        return
    clip = name != "in-backward"
    expected = alone(KNOBS[name], sizes=(BATCH,) * STEPS, clip=clip)
    for found in on_ranks(2, losses, knobs, 2, (BATCH,) * STEPS, clip):
        assert found == pytest.approx(expected, abs=BF16 if "16" in name else LOW.get(name, EXACT))


@pytest.mark.parametrize("name", ["plain", "qlora", "chunked", "micro-batches"])
def test_replicas_of_shards_learn_the_same_on_four_ranks(name: str) -> None:
    for found in on_ranks(4, losses, KNOBS[name] | HSDP, 4):
        assert found == pytest.approx(alone(KNOBS[name]), abs=2 * EXACT)


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_batches_that_do_not_divide_count_each_sample_once(parallel: dict[str, Any]) -> None:
    """Of 12, 5 and 1 samples in micro-batches of 2 on 3 ranks: one rank has fewer micro-batches, two have none."""
    sizes, knobs = (BATCH, 5, 1), parallel | {"micro_batch_size": 2}
    expected = alone({"micro_batch_size": 2}, sizes=sizes)
    for found in on_ranks(3, losses, knobs, 3, sizes):
        assert found == pytest.approx(expected, abs=EXACT)


def test_tied_weights_are_one_group() -> None:
    (expected,) = on_ranks(1, tied, {}, 1)
    for found in on_ranks(2, tied, FSDP, 2):
        assert found == pytest.approx(expected, abs=EXACT)


def tied(knobs: Mapping[str, Any], world: int) -> list[float]:
    return losses(knobs, world, tie_word_embeddings=True)


def returned(knobs: Mapping[str, Any]) -> tuple[bool, ...]:
    """A model given from outside, before and after three steps."""
    workload, hardware = workload_of(), dataclasses.replace(CPU, devices=2)
    torch.manual_seed(torch.distributed.get_rank())  # ranks start from other weights
    model = workload.model()
    kinds = [type(module) for module in model.modules()]
    parameters, attributes = dict(model.named_parameters()), [set(vars(module)) for module in model.modules()]
    setup = build(workload, knobs, hardware, model=model, hyperparameters=Hyperparameters(lr=RATE))
    for step in range(STEPS):
        own, _ = own_samples(batch_of(workload, step), setup.ranks.sampler, 2)
        accumulate(setup, own)
        update(setup)
    setup.close()
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    sums = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
    mean = setup.ranks.sum_of(sums.clone()) / 2
    return (
        [type(module) for module in model.modules()] == kinds,
        [set(vars(module)) for module in model.modules()] == attributes,
        all(parameter is parameters[name] for name, parameter in model.named_parameters()),
        all(type(p.data) is torch.Tensor and p.grad is None for p in model.parameters()),
        not hooks,
        torch.equal(sums, mean),  # all ranks hold the same weights
    )


@pytest.mark.parametrize("knobs", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_model_comes_back_as_it_was_but_trained(knobs: dict[str, Any]) -> None:
    for answers in on_ranks(2, returned, knobs):
        assert answers == (True,) * 6


def skipped(knobs: Mapping[str, Any]) -> list[tuple[bool, float]]:
    """Whether each step was taken, and the scale after it: in the second, a gradient overflows on the last rank."""
    hardware = dataclasses.replace(CPU, devices=2)
    setup = build(workload_of(), knobs | {"precision": "fp16-mixed"}, hardware)
    assert setup.scaler is not None
    weight = setup.model.model.layers[0].mlp.down_proj.weight
    found = []
    for step in range(STEPS):
        overflows = step == 1 and setup.ranks.rank == 1
        hook = weight.register_hook(lambda gradient: gradient * torch.inf) if overflows else None
        accumulate(setup, own_samples(batch_of(workload_of(), step), setup.ranks.sampler, 2)[0])
        if overflows and isinstance(weight.grad, DTensor):
            weight.grad.to_local()[-1] = torch.inf
        found.append((update(setup), setup.scaler.get_scale()))
        if hook:
            hook.remove()
    setup.close()
    sums = torch.tensor([float(p.double().sum()) for p in setup.model.parameters()], dtype=torch.float64)
    assert torch.equal(setup.ranks.sum_of(sums.clone()) / 2, sums), "all ranks hold the same weights"
    return found


@pytest.mark.parametrize("knobs", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(knobs: dict[str, Any]) -> None:
    first, second = on_ranks(2, skipped, knobs)
    assert first == second
    assert [taken for taken, _ in first] == [True, False, True]
    assert first[1][1] < first[0][1]


def bytes_while_building(knobs: Mapping[str, Any], given: bool) -> tuple[int, int]:
    """The most that building took, and the bytes of the weights that one rank keeps."""
    workload, hardware = workload_of(num_hidden_layers=8), dataclasses.replace(CPU, devices=2)
    with StorageTracker() as tracker:
        model = workload.model() if given else None
        tracker.see(list(model.parameters()) if model else [])
        before = tracker.live
        setup = build(workload, knobs, hardware, model=model)
    whole = sum(parameter.numel() * parameter.itemsize for parameter in setup.model.parameters())
    assert tracker.live <= 0.6 * whole
    return tracker.peak - before, whole


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_no_rank_holds_the_whole_model_while_it_is_built(given: bool) -> None:
    for peak, whole in on_ranks(2, bytes_while_building, FSDP, given):
        assert peak < (0.3 if given else 0.7) * whole, f"{peak} of {whole}"


def looped(knobs: Mapping[str, Any], world: int) -> list[tuple[float, float | None, int]]:
    workload, hardware = workload_of(), dataclasses.replace(CPU, devices=world)
    setup = build(workload, knobs, hardware, hyperparameters=Hyperparameters(lr=RATE, max_grad_norm=1.0))
    reports = train(setup, [batch_of(workload, step) for step in range(STEPS)], steps=STEPS)
    return [(report.loss, report.gradient_norm, report.samples) for report in reports]


@pytest.mark.parametrize("knobs", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_the_loop_takes_whole_batches_and_reports_their_loss(knobs: dict[str, Any]) -> None:
    (expected,) = on_ranks(1, looped, {}, 1)
    for reports in on_ranks(2, looped, knobs, 2):
        for found, wanted in zip(reports, expected, strict=True):
            assert found == pytest.approx(wanted, rel=EXACT)
