"""Whether more probes make an answer better: what a search hands out after so many, of each tier and of all.

`python -m benchmarks.replay_answers [TABLE ...] [--seeds N]`

Replayed as in `benchmarks.replay`, at its budgets; a search may not end by itself here, and finals are included. On
noisy tables an answer can grow worse with more probes, since the more configs are measured the luckier is the luckiest.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table
from benchmarks.replay import AT, RecordedTruth
from benchmarks.replay_samplers import ALL, Problem, answer_regrets, replay

Regrets = Mapping[int, Mapping[str, float]]  # by the number of probes, then by tier


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

    means = {at: mean([of_one[at] for of_one in found]) for at in AT}
    print(line("all", means), f"| never worse by more than {100 * worse(means):.2f}", sep="\n")


def regrets(problem: Problem, seeds: int) -> dict[int, dict[str, float]]:
    """The mean over the seeds; 1 while nothing fits."""
    runs = [replay("autofit-on", problem, seed, max(AT)) for seed in range(seeds)]
    return {at: mean([answer_regrets(run, at) for run in runs]) for at in AT}


def mean(of_runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each tier over the runs that have it."""
    by_tier = defaultdict(list)
    for of_run in of_runs:
        for name, regret in of_run.items():
            by_tier[name].append(regret)

    return {name: statistics.fmean(of_tier) for name, of_tier in by_tier.items()}


def worse(means: Regrets) -> float:
    """By how much more probes make the best answer worse at most."""
    later_and_sooner = [(later, sooner) for sooner in AT for later in AT if later >= sooner]
    return max(means[later][ALL] - means[sooner][ALL] for later, sooner in later_and_sooner)


def line(name: str, means: Regrets) -> str:
    """One problem."""
    told = f"{name:11s} regret % of the answer after {', '.join(map(str, AT))} probes:"
    for of in means[AT[0]]:
        after = " ".join(f"{100 * means[at][of]:5.2f}" for at in AT)
        told += f" {of} {after}"
    return told


if __name__ == "__main__":
    main()
