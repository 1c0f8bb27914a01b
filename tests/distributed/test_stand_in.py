"""The first rank without the others: it needs the memory that it needs among them, and its numbers stay finite."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from autofit.core.hardware import Hardware
from autofit.distributed.stand_in import first_of
from autofit.hardware.tracker import StorageTracker
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.ranks import on_ranks

TWO = tiny.CPU.of_several(2)
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp"},
    "fsdp": {"data_parallel": "fsdp"},
    "fsdp, mixed": {
        "data_parallel": "fsdp",
        "precision": "fp16-mixed",
        "activation_checkpointing": "full",
    },
    "split layers": {"tensor_parallel": 2},
    "split tokens": {"context_parallel": 2},
}


def trained(
    knobs: dict[str, Any], hardware: Hardware, steps: int = 2
) -> tuple[list[int], list[float]]:
    """The peaks of some steps of one micro-batch, and their losses."""
    workload = tiny.llama_workload(4)
    tracker = StorageTracker()
    peaks = []
    losses = []
    with tracker:
        setup = build(
            workload, {"micro_batch_size": 2 if "data_parallel" in knobs else 4, **knobs}, hardware
        )
        batch = workload.batch(4 // setup.ranks.layout.dp_degree)
        for _ in range(steps):
            tracker.reset_peak()
            losses.append(float(train_step(setup, batch)))
            peaks.append(tracker.peak)
    setup.close()
    return peaks, losses


def both() -> dict[str, tuple[int, int, list[float]]]:
    """On each of two ranks: by kind the peak of a step among both, the smallest of some that find
    the optimizer's state, since gloo keeps inputs until a thread of its own is done; the peak
    alone; and the losses alone."""
    together = {name: min(trained(knobs, TWO, 5)[0][1:]) for name, knobs in KINDS.items()}
    dist.destroy_process_group()
    with first_of(2, 1, "cpu"):
        alone = {name: trained(knobs, TWO) for name, knobs in KINDS.items()}
    return {name: (together[name], peaks[-1], losses) for name, (peaks, losses) in alone.items()}


def test_it_needs_the_memory_that_it_needs_among_all_and_stays_finite() -> None:
    found, _ = on_ranks(2, both)
    off = {name: alone - together for name, (together, alone, _) in found.items()}
    assert all(abs(nbytes) <= 64 for nbytes in off.values()), off
    assert all(math.isfinite(loss) for _, _, losses in found.values() for loss in losses)


def exchanged() -> list[Any]:
    """What a rank of four gets, where the others have what it has."""
    dist.destroy_process_group()
    with first_of(4, 1, "cpu"):
        own = torch.tensor([1.0, 2.0])
        gathered, scattered = torch.full((8,), math.nan), torch.full((2,), math.nan)
        dist.distributed_c10d._get_default_group()._allgather_base(gathered, own).wait()
        dist.distributed_c10d._get_default_group()._reduce_scatter_base(scattered, gathered).wait()
        work = dist.all_reduce(own, async_op=True)
        changed = all_to_all_single_autograd(
            gathered.clone().requires_grad_(), None, None, dist.group.WORLD
        )
        numbers: list[Any] = [None] * 4
        dist.all_gather_object(numbers, dist.get_rank())
        of_work = work.get_future().value()[0].tolist()  # DistributedDataParallel asks
    return [gathered.tolist(), scattered.tolist(), own.tolist(), of_work, changed.tolist(), numbers]


def test_what_is_exchanged_is_its_own() -> None:
    own, whole = [1.0, 2.0], [1.0, 2.0] * 4
    assert on_ranks(1, exchanged) == [[whole, own, own, own, whole, [0] * 4]]
