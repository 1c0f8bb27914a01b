"""A trace of one rank shows what real ranks do: bytes at the peak, and what they exchange."""

import dataclasses
import functools
import json
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autofit.core.errors import UntraceableError
from autofit.core.layout import Layout
from autofit.core.workload import Workload
from autofit.estimate.fake_ranks import collective_of, fake_ranks
from autofit.estimate.peak import peak_of
from autofit.estimate.recorder import Recorder
from autofit.estimate.trace import trace
from autofit.hardware.tracker import StorageTracker
from autofit.setup.sharding import NEW_ENOUGH
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload

# the first one makes the optimizer's state, and DDP rebuilds its buckets before the second
BATCH, STEPS = (8, 5)
CLOSE = 64  # bytes: scalars that a run holds
FSDP, DDP, LORA = {"data_parallel": "fsdp"}, {"data_parallel": "ddp"}, {"lora_rank": 4}
QLORA = LORA | {"quantization": "nf4-dq", "activation_checkpointing": "full"}
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, FSDP | {"micro_batch_size": 4}),
    "zero-2": (2, FSDP | {"micro_batch_size": 2, "reshard_after_forward": False}),
    "mixed": (2, FSDP | {"micro_batch_size": 2, "precision": "bf16-mixed"}),
    # whose gradients wait for the last micro-batch
    "adapters": (2, FSDP | LORA | {"micro_batch_size": 2}),
    "in-backward": (2, FSDP | {"micro_batch_size": 4, "optimizer_in_backward": True}),
    "context": (2, FSDP | {"micro_batch_size": 8, "context_parallel": 2}),
    "ddp": (2, DDP | {"micro_batch_size": 4}),
    "ddp-adapters": (2, DDP | LORA | {"micro_batch_size": 2}),
    "tensor": (
        2,
        {"micro_batch_size": 8, "tensor_parallel": 2, "activation_checkpointing": "full"},
    ),
    "hsdp": (4, FSDP | {"micro_batch_size": 1, "data_parallel_replicate": 2}),
    "tensor-fsdp": (4, FSDP | {"micro_batch_size": 4, "tensor_parallel": 2}),
}
if NEW_ENOUGH:
    CONFIGS["qlora"] = (2, FSDP | QLORA | {"micro_batch_size": 4})
Exchanged = Counter[tuple[str, int, int, int]]


def workload() -> Workload:
    return dataclasses.replace(llama_workload(), effective_batch_size=BATCH)


class Watch(StorageTracker):
    """Counts what is exchanged, too."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanged: Exchanged = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and (found := collective_of(func, args, result)):
            self.exchanged[found.kind, found.nbytes, found.ranks, found.stride] += 1
        return result


def measured(knobs: dict[str, Any], world: int) -> tuple[int, Exchanged]:
    """(the lowest peak of a step, what the last one exchanged) on this rank. gloo's own thread frees some inputs later
    in one step than in another."""
    watch, peaks = Watch(), []
    with watch:
        setup = build(workload(), knobs, dataclasses.replace(CPU, devices=world))
        batch = workload().batch(BATCH // setup.ranks.layout.dp_degree)
        for _ in range(STEPS):
            watch.exchanged = Counter()
            watch.reset_peak()
            accumulate(setup, batch)
            update(setup)
            peaks.append(watch.peak)
    setup.close()
    return min(peaks[2:]), watch.exchanged


def of_each(names: list[str], world: int) -> dict[str, tuple[int, Exchanged]]:
    return {name: measured(CONFIGS[name][1], world) for name in names}


@functools.cache
def on_all(world: int) -> list[dict[str, tuple[int, Exchanged]]]:
    return on_ranks(
        world, of_each, [name for name, (ranks, _) in CONFIGS.items() if ranks == world], world
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_has_the_bytes_and_the_collectives_of_a_rank(name: str) -> None:
    world, knobs = CONFIGS[name]
    hardware = dataclasses.replace(CPU, devices=world)
    traced = trace(workload(), knobs, hardware)
    peak = min(found[name][0] for found in on_all(world))
    assert abs(peak_of(traced, hardware).nbytes - peak) <= CLOSE
    micro_batches = traced.config["gradient_accumulation_steps"]
    forward = traced.start("forward")
    step = [each for each in traced.collectives if each.event >= forward]
    assert step
    if micro_batches == 1:  # else a trace has one of them
        assert (
            Counter((each.kind, each.nbytes, each.ranks, each.stride) for each in step)
            == on_all(world)[0][name][1]
        )


def test_a_thousand_ranks_hold_a_thousandth() -> None:
    def parameters(world: int) -> int:
        hardware = dataclasses.replace(CPU, devices=8, nodes=world // 8)
        given = dataclasses.replace(llama_workload(hidden_size=64), effective_batch_size=world)
        knobs = FSDP | {"micro_batch_size": 1}
        return peak_of(trace(given, knobs, hardware), hardware).parts["parameters"]

    assert parameters(64) == pytest.approx(parameters(8) / 8, rel=0.02)


def test_nothing_is_left_of_fake_ranks() -> None:
    hook = sys.excepthook
    with fake_ranks(Layout(shard=4), Recorder(CPU)) as ranks:
        assert (ranks.everywhere(2.0, 3.0), ranks.sums(2.0)) == ([(2.0,) * 4, (3.0,) * 4], (8.0,))
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    with fake_ranks(Layout(), Recorder(CPU)) as one:
        assert not one.are_several


def refused() -> str:
    with pytest.raises(UntraceableError) as raised:
        trace(workload(), FSDP, dataclasses.replace(CPU, devices=2))
    return str(raised.value)


def test_a_real_rank_predicts_no_others() -> None:
    assert {"cannot predict a step of other ranks" in each for each in on_ranks(2, refused)} == {
        True
    }


def test_the_collectives_of_a_group_say_how_far_its_ranks_are_apart() -> None:
    hardware = dataclasses.replace(CPU, devices=4)
    traced = trace(workload(), FSDP | {"micro_batch_size": 4, "tensor_parallel": 2}, hardware)
    strides = {(each.ranks, each.stride) for each in traced.collectives}
    assert strides == {(2, 1), (2, 2), (4, 1)}  # split layers, shards, all
    assert json.loads(json.dumps([dataclasses.asdict(each) for each in traced.collectives]))


def test_other_tensors_are_not_exchanged() -> None:
    assert collective_of(torch.ops.aten.add.Tensor, (), None) is None


def test_one_of_two_ranks_trains_half_of_what_one_device_does() -> None:
    alone, sharded = (
        trace(workload(), knobs, hardware)
        for knobs, hardware in (({}, CPU), (FSDP, CPU.of_several(2)))
    )
    assert [shape for shape, *_ in sharded.shapes] == [
        (rows // 2, *rest) for (rows, *rest), *_ in alone.shapes
    ]
    assert len(sharded.trained) == len(alone.trained) > 0
