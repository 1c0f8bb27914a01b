"""Whether more probes make an answer better: what a search hands out after so many, finals included, by its regret.

`python -m benchmarks.replay_answers [TABLE ...] [--seeds N]`

Replayed as in `benchmarks.replay`, at its budgets; a search may not end by itself here. On noisy tables an answer can
grow worse with more probes, since the more configs are measured the luckier is the luckiest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table
from benchmarks.replay import AT, RecordedTruth
from benchmarks.replay_samplers import Problem, answers


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, and print a line for each problem and the mean over all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(TABLES.glob("*.json")))
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args(arguments)
    found = []
    for path in given.tables:
        known = RecordedTruth.of(Table.read(path))
        for budget in known.budgets():
            found.append(regrets(known.problem(budget), given.seeds))
            print(line(path.stem, found[-1]), flush=True)
    means = {at: statistics.fmean(of_one[at] for of_one in found) for at in AT}
    print(line("all", means), f"| never worse by more than {100 * worse(means):.2f}", sep="\n")


def regrets(problem: Problem, seeds: int) -> dict[int, float]:
    """By the number of probes, the mean regret of what is handed out; 1 while nothing fits."""
    rows = [answers(problem, seed, AT) for seed in range(seeds)]
    lost = [
        [1 - problem.throughput(each) / problem.best if each else 1.0 for each in row]
        for row in rows
    ]
    return {
        at: statistics.fmean(of_one) for at, of_one in zip(AT, zip(*lost, strict=True), strict=True)
    }


def worse(means: Mapping[int, float]) -> float:
    """By how much more probes make it worse at most."""
    return max(means[later] - means[sooner] for sooner in AT for later in AT if later >= sooner)


def line(name: str, means: Mapping[int, float]) -> str:
    """One problem."""
    after = " ".join(f"{100 * means[at]:5.2f}" for at in AT)
    return f"{name:11s} regret % of the answer after {', '.join(map(str, AT))} probes: {after}"


if __name__ == "__main__":
    main()
