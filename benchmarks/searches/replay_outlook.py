"""How right a search is about other budgets and about what each knob buys: replayed on tables of everything.

`python -m benchmarks.replay_outlook [TABLE ...] [--seeds N] [--json]`

Searches are replayed as in `benchmarks.replay`, at budgets in which 30, 50 and 70 % of the configs fit. After each, the
fastest config that it names for half, five quarters and twice the budget is held against the table: whether it fits
there, how far off its speed against the best's is, as it was said, and how much slower it is than the fastest that
fits. So is what is predicted of every single change of the best config: its speed against the best's, its peak, and
whether it fits.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.pareto import fastest_within
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.hardware.budgets import other_budgets
from autofit.search.pareto import Evidence, ParetoReport, pareto_report
from autofit.search.ranking import Ranking
from autofit.search.study import Limits, SearchProblem, search
from autofit.search.verification import verify
from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table
from benchmarks.replay import RecordedTruth
from benchmarks.replay_samplers import Problem, Replay

_PROBES, _TOLERANCE = 40, 0.03  # autofit's defaults
_KNOBS = "single changes of a knob"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, and print what it came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(TABLES.glob("*.json")))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for path in given.tables:
        known = RecordedTruth.of(Table.read(path))
        for budget in known.budgets():
            problem = known.problem(budget)
            for seed in range(given.seeds):
                rows += judged(problem, known.table.hardware, seed)
    found = summary(rows)
    print(json.dumps(found, indent=1) if given.json else report(found))


def judged(problem: Problem, hardware: Hardware, seed: int) -> Iterator[Row]:
    """What one search says of what it did not measure, beside the truth."""
    run = Replay(problem, random.Random(seed), _PROBES)
    asked = SearchProblem(
        probe=lambda number, config, best: run.probe(config),
        constraints=problem.constraints,
        memory_order=lambda knob, value: techniques.technique_named(knob).memory_order(value),
        on_finished=lambda measurement, best: run.leaders.append(best.config if best else None),
        predict=lambda configs: problem.expected,
    )
    limits = Limits(trials=_PROBES, memory_bytes=problem.budget, tolerance=_TOLERANCE)
    found = search(problem.space, asked, limits=limits, seed=seed)
    ranking = Ranking(_TOLERANCE, lambda config: ())
    finals = verify(found.measurements, found.posterior, run.again, ranking)
    evidence = Evidence(
        best=ranking.recommend(finals.candidates()),
        measurements=(*finals.explored, *finals.verified),
        failed=finals.failed,
        surrogate=found.surrogate,
        predictions=problem.expected,
        budget=Budget(problem.budget, hardware.host_memory_bytes),
        hardware=hardware,
        workload=Workload(
            model=dict, batch=lambda count: count, effective_batch_size=problem.samples
        ),
    )
    assert evidence.best, "these budgets hold some"
    around = pareto_report(
        evidence, others=other_budgets(evidence.budget, hardware), tolerance=_TOLERANCE
    )
    yield from _of_budgets(around, evidence, problem)
    yield from _of_knobs(around, evidence, problem)


def _of_budgets(around: ParetoReport, evidence: Evidence, problem: Problem) -> Iterator[Row]:
    for other in other_budgets(evidence.budget, evidence.hardware):
        for name in around.frontier:
            within = [
                problem.throughput(config)
                for config, row in problem.rows.items()
                if tier(config) == name
                and row.step_seconds
                and (row.peak_bytes or 0) <= other.device_bytes
            ]
            point = fastest_within(around.frontier[name], other.device_bytes)
            if point and within:
                yield {
                    "of": f"{other.why}, {'measured' if point.measured else 'predicted'}",
                    "fits": (problem.rows[point.config].peak_bytes or 0) <= other.device_bytes,
                    "speed_off": _speed_off(
                        point.config, point.samples_per_second, evidence, problem
                    ),
                    "regret": 1 - problem.throughput(point.config) / max(within),
                }
            elif point or within:
                yield {"of": f"{other.why}, whether anything fits", "fits": False}


def _of_knobs(around: ParetoReport, evidence: Evidence, problem: Problem) -> Iterator[Row]:
    for each in around.alternatives:
        row = problem.rows[each.config]
        if not each.measured and row.step_seconds and row.peak_bytes and each.samples_per_second:
            yield {
                "of": _KNOBS,
                "fits": each.fits == (row.peak_bytes <= problem.budget),
                "speed_off": _speed_off(each.config, each.samples_per_second, evidence, problem),
                "peak_off": abs((each.peak_bytes or 0) / row.peak_bytes - 1),
            }


def _speed_off(config: Config, said: float, evidence: Evidence, problem: Problem) -> float:
    """Of a speed that is told against the best's."""
    assert evidence.best, "there is one to be told against"
    true = problem.throughput(config) / problem.throughput(evidence.best.config)
    return abs(said / evidence.best.throughput / true - 1)


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """By what it is of: how many, the share that fits as said, the median and the 95th percentile of what is off."""
    found = {}
    for name in dict.fromkeys(row["of"] for row in rows):
        of_one = [row for row in rows if row["of"] == name]
        told: Row = {"count": len(of_one), "fits": float(np.mean([row["fits"] for row in of_one]))}
        for key in ("speed_off", "regret", "peak_off"):
            figures = [row[key] for row in of_one if key in row]
            if figures:
                told |= {
                    key: float(np.median(figures)),
                    f"{key}_95": float(np.percentile(figures, 95)),
                }
        found[name] = told
    return found


def report(found: dict[str, Row]) -> str:
    """The summary as text: medians, and 95th percentiles in brackets."""
    lines = []
    for name, row in sorted(found.items()):
        figures = "".join(
            f", {key.replace('_', ' ')} {row[key]:.1%} ({row[f'{key}_95']:.1%})"
            for key in ("speed_off", "regret", "peak_off")
            if key in row
        )
        lines.append(f"{name}: {row['count']}, as said whether it fits {row['fits']:.1%}{figures}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
