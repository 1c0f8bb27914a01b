"""Stage ranks: what training on several devices takes of each: on one card that stands for one of them, among others
that send nothing (PyTorch's fake process group), and, where there are several cards, on those.

The card that stands alone measures memory and the time of computing. With real cards beside it, its memory is held
against theirs, and their losses against those of one.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autofit.core.workload import Workload
from autofit.distributed.launcher import on_ranks
from autofit.distributed.stand_in import first_of
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.training.build import build
from autofit.training.local_batch import local_batch
from autofit.training.step import train_step
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.loop import apart
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

STAGE = "ranks"
WORLDS = (2, 8)  # that one card stands for one of
_FSDP: dict[str, Any] = {"data_parallel": "fsdp", "precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp", "precision": "bf16"},
    "fsdp": _FSDP,
    "fsdp, kept": _FSDP | {"reshard_after_forward": False},
    "fsdp, bf16-mixed": _FSDP | {"precision": "bf16-mixed"},
    "fsdp, checkpointed": _FSDP | {"activation_checkpointing": "full"},
    "fsdp, qlora": _FSDP | {"lora_rank": 16, "lora_targets": "all-linear", "quantization": "nf4"},
}
_STEPS, _WARM = 5, 2
_LEAST, _TIMEOUT = 40.0, 60.0


def run(bench: Bench) -> None:
    """Each case on the stand-in for one of 2 and of 8, and on two cards where they are."""
    model, *_ = bench.grid.models.values()
    two = bench.smoke or torch.cuda.device_count() > 1
    for name in ("fsdp",) if bench.smoke else CASES:
        config = {"micro_batch_size": 1, **CASES[name]}
        worlds = WORLDS[:1] if bench.smoke else WORLDS
        pieces = [(f"{name}: one of {world}", stand_in, world) for world in worlds]
        pieces += [(f"{name}: two", real, 2)] if two else []
        for key, measure, world in pieces:
            if bench.store.get(STAGE, key) is None:
                bench.need(1.0 if bench.smoke else _LEAST)
                workload = bench.workload(model, max(WORLDS))
                row = apart(bench, measure, workload, config, world, bench.device, log="ranks.log")
                bench.store.add(STAGE, key, row)


def stand_in(workload: Workload, knobs: Mapping[str, Any], world: int, device: str) -> Row:
    """In a child: the first of so many ranks, of which there are no others."""
    with first_of(world, 1, device):
        return trained(None, workload, knobs, device)


def real(workload: Workload, knobs: Mapping[str, Any], world: int, device: str) -> Row:
    """In a child: so many ranks, each with a card of its own."""
    row: Row = on_ranks(
        trained, workload, knobs, device, count=world, device=device, timeout=_TIMEOUT
    )
    return row


def trained(_: object, workload: Workload, knobs: Mapping[str, Any], device: str) -> Row:
    """Some steps of one rank, the first ones without being timed: peak bytes of the steps, seconds, the last loss."""
    hardware = detect(device).of_several(dist.get_world_size())
    setup = build(workload, knobs, hardware)
    own = local_batch(setup, workload.batch(workload.effective_batch_size)).batch
    tracker, seconds, loss = StorageTracker(), [], 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tracker if device == "cpu" else contextlib.nullcontext():
        for _step in range(_STEPS):
            start = time.perf_counter()
            loss = float(train_step(setup, own))
            seconds.append(time.perf_counter() - start)
    peak = tracker.peak if device == "cpu" else torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else None
    return {
        "allocated": setup.ranks.largest(peak)[0],
        "reserved": reserved and setup.ranks.largest(reserved)[0],
        "step_seconds": statistics.median(seconds[_WARM:]),
        "loss": loss,
    }


def summarize(store: Store) -> Summary:
    """What each takes, and how far the stand-in's memory is from that of two real ones."""
    rows = store.rows(STAGE)
    lines: list[list[str | None]] = []
    errors: list[float] = []
    for name in CASES:
        alone, beside = rows.get(f"{name}: one of 2", {}), rows.get(f"{name}: two", {})
        for key, row in (
            (key, rows.get(f"{name}: {key}", {})) for key in ("one of 2", "one of 8", "two")
        ):
            if "allocated" in row:
                reserved = row["reserved"] and f"{row['reserved'] / 2**30:.3f}"
                lines.append(
                    [
                        name,
                        key,
                        f"{row['allocated'] / 2**30:.3f}",
                        reserved,
                        f"{row['step_seconds']:.3f}",
                    ]
                )
        if "allocated" in alone and "allocated" in beside:
            errors.append(abs(alone["allocated"] / beside["allocated"] - 1))
    head = ("config", "ranks", "allocated, GiB", "reserved, GiB", "s a step")
    tables = [Table("One of several devices", head, lines)] if lines else []
    figures = {"stand-in off by at most": max(errors)} if errors else {}
    return Summary(
        figures, tables, [f"{key}: {row['failed']}" for key, row in rows.items() if "failed" in row]
    )


RANKS = Stage(STAGE, share=0.5, least_seconds=60.0, run=run, summarize=summarize)
