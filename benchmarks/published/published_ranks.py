"""Predicted against published speed of training on several GPUs: `python -m benchmarks.published_ranks`.

Every judged row of data/published_multi_gpu.csv is a run of autofit's own models and knobs. One rank of it is traced;
what it exchanges goes over the links that the catalogue's card usually has. Nothing is fitted row by row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from autofit.api.estimate import workload_of
from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Traits, Workload
from autofit.estimate.allocator_events import reserved_for
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.optimizer_state import cost_of_update
from autofit.estimate.peak import peak_of
from autofit.estimate.ranks import step_seconds
from autofit.estimate.rates import rates_of
from autofit.estimate.roofline import Speed
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import trace_skeleton
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, links_of
from autofit.techniques import canonicalize
from benchmarks.published_report import Outcome, tell, told
from benchmarks.published_runs import card_of, inexpressible, measured, rows, run_of
from benchmarks.published_speed import work_of
from benchmarks.published_titan import titan_run
from benchmarks.published_trainer import one_root, trainer_run

FACTOR = 1.6  # that 80 % of the rows are to be within
_traits: dict[str, Traits | None] = {}


def outcome_of(row: dict[str, str]) -> Outcome:
    """Predict one row."""
    workload, config, hardware = run_of(row)
    return Outcome(
        row, work_of(row, workload), measured(row), seconds_of(row, workload, config, hardware)
    )


def seconds_of(
    row: dict[str, str], workload: Workload, config: Config, hardware: Hardware
) -> float:
    """The predicted seconds of a step, from few blocks of the model."""
    if row["model"] not in _traits:
        _traits[row["model"]] = workload_of(workload, hardware.of_several(1)).traits
    workload = replace(workload, traits=_traits[row["model"]])
    knobs = canonicalize(config, workload, hardware)
    few = Skeleton.cut_short(workload, hardware, Cut.of(knobs))
    traced = trace_skeleton(workload, knobs, hardware, few)
    shapes: Counter[tuple[torch.Size, torch.dtype, bool]] = Counter()
    for shape, dtype, block in traced.shapes:
        shapes[shape, dtype, block is not None] += traced.depth.times(block) if traced.depth else 1
    rates = rates_of(card(str(card_of(row))))
    update = cost_of_update(workload, hardware, knobs, shapes).seconds(
        Speed.of_update(rates, hardware, knobs)
    )
    return update + step_seconds(
        traced, Speed.of(rates, hardware, knobs), hardware, links_of(hardware)
    )


def memory_of(row: dict[str, str]) -> float:
    """The predicted bytes of a rank, as they were published: allocated, or reserved by the allocator as it is without
    PYTORCH_CUDA_ALLOC_CONF, of which no publisher says a word."""
    workload, config, hardware = (
        titan_run(row) if row["id"].startswith("torchtitan") else trainer_run(row)
    )
    workload = replace(workload, traits=workload_of(workload, hardware.of_several(1)).traits)
    with one_root():
        traced = trace(workload, canonicalize(config, workload, hardware), hardware)
    allocated = peak_of(traced, hardware).nbytes + workspace_bytes(hardware)
    return max(
        allocated,
        reserved_for(traced, hardware, expandable=False) * (row["mem_kind"] == "reserved"),
    )


def memory_table(chosen: list[dict[str, str]]) -> str:
    """Predicted and published memory of the rows that tell it, and what the errors come to."""
    lines = [
        "| row | model | config | of | GiB | published | error |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    errors: dict[str, list[float]] = {}
    for row in chosen:
        predicted, published = memory_of(row) / GIB, float(row["mem_value"])
        error = predicted / published - 1
        for group in (row["source"].partition("@")[0], "all"):
            errors.setdefault(group, []).append(error)
        cells = (
            row["id"],
            row["model"],
            told(row),
            row["mem_kind"],
            f"{predicted:.2f}",
            f"{published:.2f}",
        )
        lines.append("| " + " | ".join((*cells, f"{error:+.1%}")) + " |")
    for group, found in sorted(errors.items(), key=lambda each: len(each[1])):
        sizes = [abs(error) for error in found]
        median = f"median error {statistics.median(sizes):.1%}, bias {statistics.fmean(found):+.1%}"
        share = sum(size <= 0.12 for size in sizes) / len(sizes)
        lines.append(f"\n{group}: {len(found)} rows: {median}, {share:.0%} within 12 %.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Predict every judged row and print the tables and what they come to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_ranks", description=__doc__
    )
    parser.add_argument("--only", default="", help="rows whose id begins so")
    parser.add_argument(
        "--memory", action="store_true", help="hold memory against what was published, too"
    )
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args(arguments)
    chosen = [row for row in rows("published_multi_gpu") if row["id"].startswith(given.only)]
    groups = {"By publisher and cards": lambda each: each.group}
    tell(chosen, outcome_of, inexpressible, factor=FACTOR, groups=groups, out=given.out)
    with_memory = [row for row in chosen if inexpressible(row) is None and row["mem_value"]]
    if given.memory and with_memory:
        print(f"\n{memory_table(with_memory)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
