"""Training on several ranks is training on one: three steps of uneven labels, each loss compared."""

import dataclasses
import functools
import traceback
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.hardware.tracker import StorageTracker
from autofit.setup.sharding import NEW_ENOUGH
from autofit.techniques import all_techniques, canonicalize, refuse
from autofit.techniques import compile as compiling
from autofit.training.build import build
from autofit.training.local_batch import LocalBatch
from autofit.training.loop import train
from autofit.training.step import accumulate, loss_value, update
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload, mixture_workload, mlp_workload
from tests.tolerances import LOSS, LOSS_OF_8_BITS, LOSS_OF_16_BITS, LOSS_OF_16_BITS_IN_LARGE_STEPS

BATCH, STEPS, RATE = 12, 3, 1e-2
FSDP = {"data_parallel": "fsdp"}
ZERO_2 = FSDP | {"reshard_after_forward": False}
DDP = {"data_parallel": "ddp"}
HSDP = FSDP | {"data_parallel_replicate": 2}
LORA: dict[str, Any] = {"lora_rank": 4}
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 1},
    "checkpointed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective", "micro_batch_size": 2},
    "alternate": {"activation_checkpointing": "alternate"},
    "some blocks": {"activation_checkpointing": "full:1"},
    "compiled": {"compile": "default", "activation_checkpointing": "budget-0.5"},
    "chunked": {"loss": "chunked", "micro_batch_size": 3},
    "eager": {"attention": "eager"},
    "lora": LORA,
    "lora-micro-batches": LORA | {"micro_batch_size": 2},
    "lora-head": LORA | {"lora_targets": "all-linear+head", "lora_alpha": 4},
    "lora-head-chunked": LORA | {"lora_targets": "attention+head", "loss": "chunked"},
    "lora-dropout": LORA | {"lora_dropout": 0.1},
    "tied": {},
    "tied-lora": LORA,
    "tied-chunked": {"loss": "chunked"},
    "qlora": LORA | {"quantization": "nf4", "activation_checkpointing": "full"},
    "double": LORA | {"quantization": "nf4-dq"},
    "int8": LORA | {"quantization": "int8"},
    "mixture": {},
    "experts": LORA | {"quantization": "nf4", "lora_targets": "attention+experts"},
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-qlora": LORA | {"precision": "bf16-mixed", "quantization": "nf4"},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "foreach": {"optimizer": "adamw-foreach"},
    "bf16-master": {"precision": "bf16", "optimizer": "adamw-master"},
    "8bit": {"optimizer": "adamw-8bit"},
    "lion": {"optimizer": "lion-8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "in-backward": {"optimizer_in_backward": True},
    "head": {"head_only": True},
    "head-chunked": {"head_only": True, "loss": "chunked", "micro_batch_size": 2},
    "offloaded": {"fsdp_offload": "cpu"},
}
PARALLEL = {"ddp": DDP, "fsdp": FSDP, "zero-2": ZERO_2}
# Weights that stay gathered between forward and backward: what computes again, chunks, casts or steps in between.
OF_ZERO_2 = (
    *("plain", "micro-batches", "checkpointed", "lora-head-chunked", "tied-chunked"),
    *("qlora", "mixture", "bf16-mixed", "fp16-mixed", "8bit", "in-backward", "head", "offloaded"),
)
# Each rank computes by itself: what trains other weights, in other formats, in parts, or not at all.
OF_DDP = (
    *("plain", "micro-batches", "checkpointed", "lora", "lora-head-chunked", "tied-chunked"),
    *("qlora", "int8", "mixture", "bf16", "bf16-mixed", "fp16-mixed", "8bit", "adafactor", "muon"),
    "head-chunked",
)
TRIED = {"ddp": OF_DDP, "zero-2": OF_ZERO_2}
OLD = (
    set()
    if NEW_ENOUGH
    else {name for name, knobs in KNOBS.items() if "nf4" in str(knobs.get("quantization"))}
)
UNDIVIDED = {"int8", "adafactor", "muon", *OLD}
REFUSED = {"ddp": {"in-backward"}, "fsdp": UNDIVIDED, "zero-2": UNDIVIDED}
CLOSE = (
    {
        "8bit": LOSS_OF_8_BITS,  # a part of less than 4096 elements has its state in fp32
        "lion": 1e-3,  # the same; where that turns the sign of what is left of the state, a step goes the other way
        "int8": 1e-4,  # sums over other rows
        "muon": 1e-4,  # makes directions of gradients in bf16
        # A token whose router hardly prefers one expert may go to the other: 5e-5 of a loss of 180 labels.
        "mixture": 2e-4,
        "experts": 2e-4,  # the same
        "lora-dropout": 0.05,  # other draws
    }
    | {name: LOSS_OF_16_BITS for name in KNOBS if "16" in name}
)
CLOSE["bf16-mixed"] = (
    LOSS_OF_16_BITS_IN_LARGE_STEPS  # fsdp's gradients are of bf16, those of one device of fp32
)
ANSWER = 280.0  # seconds until all that is tried has been learnt


def workload_of(name: str = "", **changes: Any) -> Workload:
    made = mixture_workload() if name in ("mixture", "experts") else llama_workload(**changes)
    if name.startswith("tied"):
        made = llama_workload(tie_word_embeddings=True)
    return dataclasses.replace(made, effective_batch_size=BATCH)


def batch_of(workload: Workload, step: int, samples: int = BATCH) -> dict[str, torch.Tensor]:
    """Samples of uneven numbers of labels, some without any; no longer than whole ones."""
    torch.manual_seed(step)
    batch: dict[str, torch.Tensor] = workload.batch(samples)
    labels = batch["labels"].clone()
    for row in range(samples):
        labels[row, : 1 + (row * 5 + step) % 16] = -100
    return {**batch, "labels": labels}


def losses(
    knobs: Mapping[str, Any], world: int, sizes: tuple[int, ...] = (BATCH,) * STEPS, name: str = ""
) -> list[float]:
    """The loss of each step on each rank, evaluating in between."""
    workload, hardware = workload_of(name), dataclasses.replace(CPU, devices=world)
    clip = None if knobs.get("optimizer_in_backward") else 1.0
    setup = build(
        workload, knobs, hardware, hyperparameters=Hyperparameters(lr=RATE, max_grad_norm=clip)
    )
    found = []
    for step, samples in enumerate(sizes):
        own, counts = own_samples(
            batch_of(workload, step, samples), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
        )
        found.append(float(accumulate(setup, LocalBatch(own, counts))))
        assert update(setup)
        if step == 0:
            with torch.no_grad():
                loss_value(setup, batch_of(workload, 0, 1))  # a forward without a backward
    setup.close()
    return found


def each_of(
    names: tuple[str, ...], parallel: Mapping[str, Any], world: int
) -> dict[str, list[float] | str]:
    """The losses by name, or the traceback of what was raised."""
    compiling.BACKEND = "aot_eager"
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = losses(KNOBS[name] | parallel, world, name=name)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def learnt(kind: str) -> list[dict[str, list[float] | str]]:
    """What each rank learnt beside a way to train in parallel, one name after the other; "": alone."""
    tried = TRIED.get(kind, KNOBS)
    names = tuple(name for name in tried if name not in REFUSED.get(kind, ()))
    world = 2 if kind else 1
    return on_ranks(world, each_of, names, PARALLEL.get(kind, {}), world, answer=ANSWER)


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("name", KNOBS)
def test_each_knob_learns_the_same_on_two_ranks(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    workload, hardware = workload_of(name), dataclasses.replace(CPU, devices=2)
    reason = refuse(
        canonicalize(KNOBS[name] | PARALLEL[kind], workload, hardware), workload, hardware
    )
    assert bool(reason) == (name in REFUSED[kind])
    if reason:
        assert is_sentence(reason)
        return
    if name not in TRIED.get(kind, KNOBS):
        return  # as of fsdp

    (alone,) = learnt("")
    expected = alone[name]
    assert isinstance(expected, list), expected
    for found in learnt(kind):
        assert isinstance(found[name], list), found[name]
        assert found[name] == pytest.approx(expected, abs=CLOSE.get(name, LOSS))


def is_sentence(reason: str) -> bool:
    """Whether a refusal ends in a remedy."""
    return reason.endswith(".") and any(
        f" {word}" in reason for word in ("use", "leave", "choose", "set", "install")
    )


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_value_is_run_above_or_refused_in_a_sentence(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    ran = {
        (knob, value)
        for name, knobs in KNOBS.items()
        if name not in REFUSED[kind]
        for knob, value in knobs.items()
    }
    # techniques/test_optimizer_over_shards.py
    elsewhere = {("optimizer", "adamw-4bit"), ("optimizer", "adamw-fp8")}
    hardware = dataclasses.replace(
        CPU, devices=2, device=device, here=device == "cpu", capability=(9, 0)
    )
    for technique in all_techniques():
        for value in technique.values:
            beside = {"lora_rank": 4} if technique.name == "quantization" else {}
            beside |= {"compile": "default"} if str(value).startswith("budget") else {}
            without = canonicalize({**PARALLEL[kind], **beside}, workload_of(), hardware)
            config = canonicalize(
                {**PARALLEL[kind], **beside, technique.name: value}, workload_of(), hardware
            )
            reason = refuse(config, workload_of(), hardware)
            if reason:
                assert is_sentence(reason), reason
            elif device == "cpu" and config != without and technique.name not in ZERO_2:
                alike = str(value).startswith("budget") or value == "max-autotune-no-cudagraphs"
                assert alike or (technique.name, value) in ran | elsewhere, (
                    f"{technique.name} {value} is not tried"
                )


def test_replicas_of_shards_learn_the_same_on_four_ranks() -> None:
    names = tuple(
        name for name in ("plain", "qlora", "chunked", "micro-batches") if name not in UNDIVIDED
    )
    (expected,) = on_ranks(1, each_of, names, {}, 1)
    for found in on_ranks(4, each_of, names, HSDP, 4):
        for name in names:
            assert found[name] == pytest.approx(expected[name], abs=LOSS), name


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_batches_that_do_not_divide_count_each_sample_once(parallel: dict[str, Any]) -> None:
    """Of 12, 5 and 1 samples in micro-batches of 2 on 3 ranks: one rank has fewer micro-batches, two have none."""
    sizes, knobs = (BATCH, 5, 1), parallel | {"micro_batch_size": 2}
    (expected,) = on_ranks(1, losses, {"micro_batch_size": 2}, 1, sizes)
    for found in on_ranks(3, losses, knobs, 3, sizes):
        assert found == pytest.approx(expected, abs=LOSS)


def returned(knobs: Mapping[str, Any]) -> tuple[bool, ...]:
    """A model given from outside, before and after three steps."""
    workload, hardware = workload_of(), dataclasses.replace(CPU, devices=2)
    torch.manual_seed(torch.distributed.get_rank())  # ranks start from other weights
    model = workload.model()
    kinds = [type(module) for module in model.modules()]
    parameters, attributes = (
        dict(model.named_parameters()),
        [set(vars(module)) for module in model.modules()],
    )
    setup = build(workload, knobs, hardware, model=model, hyperparameters=Hyperparameters(lr=RATE))
    for step in range(STEPS):
        own, _ = own_samples(batch_of(workload, step), setup.ranks.dp_rank, 2)
        accumulate(setup, own)
        update(setup)
    setup.close()
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks, *module._forward_pre_hooks)
    ]
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


def unlabelled(knobs: Mapping[str, Any]) -> tuple[float, bool, bool]:
    """The loss of a batch without a label, whether a step was taken, and whether weights are divided after it."""
    workload = workload_of()
    setup = build(workload, knobs, dataclasses.replace(CPU, devices=2))
    batch = batch_of(workload, 0)
    batch["labels"].fill_(-100)
    loss = float(accumulate(setup, own_samples(batch, setup.ranks.dp_rank, 2)[0]))
    return loss, update(setup), all(isinstance(each, DTensor) for each in setup.model.parameters())


@pytest.mark.parametrize("knobs", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_batch_without_a_label_takes_no_step(knobs: dict[str, Any]) -> None:
    assert on_ranks(2, unlabelled, knobs) == [(0.0, False, knobs is FSDP)] * 2


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
        accumulate(setup, own_samples(batch_of(workload_of(), step), setup.ranks.dp_rank, 2)[0])
        if overflows and isinstance(weight.grad, DTensor):
            weight.grad.to_local()[-1] = torch.inf
        found.append((update(setup), setup.scaler.get_scale()))
        if hook:
            hook.remove()
    setup.close()
    sums = torch.tensor(
        [float(p.double().sum()) for p in setup.model.parameters()], dtype=torch.float64
    )
    assert torch.equal(setup.ranks.sum_of(sums.clone()) / 2, sums), (
        "all ranks hold the same weights"
    )
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
    setup = build(
        workload, knobs, hardware, hyperparameters=Hyperparameters(lr=RATE, max_grad_norm=1.0)
    )
    reports = train(setup, [batch_of(workload, step) for step in range(STEPS)], steps=STEPS)
    return [(report.loss, report.gradient_norm, report.samples) for report in reports]


@pytest.mark.parametrize("knobs", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_the_loop_takes_whole_batches_and_reports_their_loss(knobs: dict[str, Any]) -> None:
    (expected,) = on_ranks(1, looped, {}, 1)
    for reports in on_ranks(2, looped, knobs, 2):
        for found, wanted in zip(reports, expected, strict=True):
            assert found == pytest.approx(wanted, abs=LOSS)


def exchanges(workload: Workload) -> int:
    """How often ranks ask one another for their counts in two steps."""
    setup, found = build(workload, DDP, dataclasses.replace(CPU, devices=2)), 0
    asked = setup.ranks.asked

    def counted(*values: float) -> Any:
        nonlocal found
        found += 1
        return asked(*values)

    object.__setattr__(setup.ranks, "asked", counted)
    list(train(setup, [workload.batch(4)] * 2, steps=2))
    return found


def test_losses_that_count_samples_need_no_exchange_before_a_step() -> None:
    assert on_ranks(2, exchanges, mlp_workload()) == [0, 0]
    assert on_ranks(2, exchanges, workload_of()) == [2, 2]
