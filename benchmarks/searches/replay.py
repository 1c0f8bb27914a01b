"""How far a search's answer is from the true best, and what it cost: searches replayed on tables of everything.

`python -m benchmarks.replay [TABLE ...] [--sampler NAME ...] [--budget GIB ...] [--probes N] [--seeds N] [--known N]
[--workers N ...] [--blind] [--prefer NAME] [--recorded]`

Nothing is run: a probe of a replay is one of the probes that the table holds of a config, drawn by the seed, so what a
sampler sees is as noisy as the machine was. What it returns (the best that it measured; of autofit's, the one that it
expects to be, and after its finals the best of those) is judged by the median of all of them. What is best is what
`--prefer` says, for all samplers: raw speed, or as a search by default ("balanced"), which discounts it for what a
config learns less faithfully.

Each tier's answer is judged beside the best of all: what a search hands out that ends after 10 probes, and at its own
end, both after finals as autofit's, for every sampler.

A config whose peak is above the budget ran out of memory, for the price of its build and first step. Predictions are
the estimator's as it stands, with the machine's rates that the table recorded, or with `--recorded` those of the day on
which it was; `--blind` withholds them, so that a search needs many probes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autofit import techniques
from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.errors import pluralize
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import FAST, SearchOptions
from autofit.core.result import TIERS
from autofit.core.workload import Workload
from autofit.search.objectives.discounted import PREFERENCES
from autofit.search.predictions import Predictions
from autofit.search.ranking import Ranking
from autofit.search.space import Space
from autofit.training.inspect import inspect_workload
from autofit.tuning.space import space_for
from benchmarks import replay_samplers
from benchmarks.memory_models import TIER_MODELS
from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table, workload_named
from benchmarks.replay_samplers import (
    ALL,
    AUTOFIT,
    SAMPLERS,
    Problem,
    Replay,
    answer_regrets,
)

SHARES = (0.3, 0.5, 0.7)  # of the configs fit in the budgets that are replayed where none is given
CLOSE = 0.02  # of the true best: what counts as found
AT = (1, 2, 5, 10, 15, 25, 40)  # probes
ANSWERS_AT = (10, None)  # probes, None for the search's own end


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, and print what it came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(TABLES.rglob("*.json")))
    parser.add_argument("--sampler", nargs="*", choices=list(SAMPLERS), metavar="NAME")
    parser.add_argument(
        "--budget",
        nargs="*",
        type=float,
        help="GiB; default: where 30, 50 and 70 %% of configs fit",
    )
    parser.add_argument("--probes", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument(
        "--known", type=int, default=0, help="measurements that autofit has of an earlier search"
    )
    parser.add_argument(
        "--workers", nargs="*", type=int, default=[1], help="probes of autofit's at a time"
    )
    parser.add_argument("--blind", action="store_true", help="autofit has no predictions")
    parser.add_argument("--prefer", choices=PREFERENCES, default=FAST)
    parser.add_argument(
        "--recorded", action="store_true", help="predictions as of the day of the table: sooner"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    alone = given.workers == [1]
    samplers = given.sampler or [name for name in SAMPLERS if alone or name in AUTOFIT]
    if min(given.workers) < 1 or not (alone or set(samplers) <= set(AUTOFIT)):
        parser.error(f"only {' and '.join(AUTOFIT)} can have several workers.")
    found = []
    for path in given.tables:
        known = RecordedTruth.of(Table.read(path), recorded=given.recorded)
        for budget in [each * GIB for each in given.budget] if given.budget else known.budgets():
            problem = known.problem(int(budget), given.prefer)
            for name, workers in itertools.product(samplers, given.workers):
                so = {"known": given.known, "workers": workers, "blind": given.blind}
                replays = [
                    replay_samplers.replay(name, problem, seed, given.probes, **so)
                    for seed in range(given.seeds)
                ]
                figures = summary(problem, replays)
                of = {
                    "table": path.stem,
                    "devices": known.table.hardware.world,
                    "budget_gib": budget / GIB,
                }
                found.append({**of, "sampler": name if alone else f"{name} x{workers}", **figures})
                if not given.json:
                    print(line(found[-1]), flush=True)
    print(json.dumps(found, indent=1) if given.json else "\n" + report(found))


@dataclass(frozen=True)
class RecordedTruth:
    """A table, the space that it is of, and what is predicted of it."""

    table: Table
    space: Space
    constraints: Constraints
    expected: Predictions

    @classmethod
    def of(cls, table: Table, *, recorded: bool = False) -> RecordedTruth:
        """With predictions by the estimator as it stands, or as they were recorded."""
        hardware = table.hardware
        workload = _inspected(workload_named(table.about["model"]), hardware)

        path = Path(__file__).parents[2] / table.about["space"]
        options = SearchOptions(space=str(path), device=hardware.device)
        space = space_for(options, workload, hardware)
        constraints = techniques.constraints(workload, hardware)
        # A table may be older than some knobs: null, where none of them was used, may mean 1 now.
        rows = [
            dataclasses.replace(row, config=constraints.canonical(row.config)) for row in table.rows
        ]
        table = dataclasses.replace(table, rows=rows)
        configs = [row.config for row in rows]
        if set(space.configs(constraints)) != set(configs):
            raise SystemExit(
                f"the table of {table.about['model']} is not of its space as it is now: record it again."
            )

        known = [row.predicted for row in table.rows if row.predicted]
        if not recorded:
            known = table.predict(workload)
        elif len(known) < len(configs):
            raise SystemExit(f"the table of {table.about['model']} holds no predictions.")

        nbytes, seconds = zip(*known, strict=True)
        return cls(table, space, constraints, Predictions.of(configs, nbytes, seconds))

    def budgets(self) -> list[int]:
        """Bytes between the peaks of neighbours, at which these shares of the configs fit, and those
        that the model is a case of."""
        peaks = sorted(
            row.peak_bytes for row in self.table.rows if row.step_seconds and row.peak_bytes
        )
        places = [round(share * len(peaks)) for share in SHARES]
        budgets = [(peaks[place - 1] + peaks[place]) // 2 for place in places]

        case = TIER_MODELS.get(self.table.about["model"])
        if case and case.budget_gib:
            budgets.append(int(case.budget_gib * GIB))
        return budgets

    def problem(self, budget: int, prefer: str = FAST) -> Problem:
        """The search for the best config within a budget of bytes.

        Regret is of the best, before ties are decided by anything else.
        """
        about = self.table.about
        rows = {row.config: row for row in self.table.rows}
        return Problem(
            self.space,
            self.constraints,
            self.expected,
            rows,
            budget,
            int(about["effective_batch_size"]),
            Ranking(0.0, lambda config: (), PREFERENCES[prefer]),
        )


def _inspected(workload: Workload, hardware: Hardware) -> Workload:
    traits = inspect_workload(workload, hardware, budget_bytes=hardware.memory_bytes)
    return dataclasses.replace(workload, traits=traits)


def summary(problem: Problem, replays: Sequence[Replay]) -> dict[str, Any]:
    """What all seeds came to."""
    regrets = np.array([_padded(regrets_of(problem, replay)) for replay in replays])
    until = [_first_close(problem, replay) for replay in replays]
    answers = {
        str(after): [answer_regrets(replay, after) for replay in replays] for after in ANSWERS_AT
    }
    return {
        "configs": len(problem.rows),
        "fitting": sum(problem.fits(row) for row in problem.rows.values()),
        "mean_regret": {str(at): float(regrets[:, at - 1].mean()) for at in AT},
        "regret_95": {str(at): float(np.percentile(regrets[:, at - 1], 95)) for at in AT},
        "close": sum(found for _, _, found in until) / len(until),
        "probes_until_close": statistics.mean(probes for probes, _, _ in until),
        "seconds_until_close": statistics.mean(seconds for _, seconds, _ in until),
        "probes": statistics.mean(len(replay.seen) for replay in replays),
        "seconds": statistics.mean(replay.ended[len(replay.seen) - 1] for replay in replays),
        "out_of_memory": statistics.mean(_out_of_memory(replay) for replay in replays),
        "bound_held": _bound_held(problem, replays),
        "answers": answers,
        "seeds": len(replays),
    }


def regrets_of(problem: Problem, replay: Replay) -> list[float]:
    """1 - merit of what would be returned / of the best that fits, after each probe; 1 while nothing fits."""
    return [1 - problem.merit(best) / problem.best if best else 1.0 for best in _returned(replay)]


def _returned(replay: Replay) -> Iterator[Config | None]:
    if replay.leaders:
        yield from replay.leaders
        return
    for count in range(1, len(replay.seen) + 1):
        best = replay.problem.ranking.recommend(replay.seen[:count])
        yield best.config if best else None


def _padded(regrets: list[float]) -> list[float]:
    """What a search that ended returns is what it returned last."""
    return (regrets + regrets[-1:] * max(AT))[: max(AT)]


def _first_close(problem: Problem, replay: Replay) -> tuple[int, float, bool]:
    """(probes, seconds, whether) until what would be returned is close; all there were, where it never is."""
    for number, regret in enumerate(regrets_of(problem, replay)):
        if regret <= CLOSE:
            return number + 1, replay.ended[number], True
    return len(replay.ended), replay.ended[-1], False


def _bound_held(problem: Problem, replays: Sequence[Replay]) -> float | None:
    """How often nothing that was left is faster than a search said at its end; None where none said anything."""
    held = []
    for replay in replays:
        best = replay.leaders[-1] if replay.leaders else None
        if best and replay.bound is not None:
            measured = {seen.config for seen in replay.seen}
            left = [
                each
                for each, row in problem.rows.items()
                if each not in measured and problem.fits(row)
            ]
            most = max(map(problem.merit, left), default=0.0)
            # it says no more than that
            held.append(most / problem.merit(best) - 1 <= max(replay.bound, 0.0))
    return statistics.mean(held) if held else None


def _out_of_memory(replay: Replay) -> float:
    return sum(not seen.fits for seen in replay.seen) / len(replay.seen)


def line(figures: Mapping[str, Any]) -> str:
    """One table, budget and sampler."""
    regrets = " ".join(f"{100 * figures['mean_regret'][str(at)]:5.1f}" for at in AT)
    held = (
        ""
        if figures["bound_held"] is None
        else f" | bound held in {100 * figures['bound_held']:3.0f} %"
    )
    return (
        f"{figures['table']:11s} {figures['budget_gib']:6.3f} GiB {figures['sampler']:12s} mean regret % {regrets}"
        f" | 95th of 15: {100 * figures['regret_95']['15']:5.1f} | within 2 %: {100 * figures['close']:4.0f} %,"
        f" {figures['probes_until_close']:5.1f} probes {figures['seconds_until_close']:6.1f} s"
        f" | before finals: {figures['probes']:4.1f} probes {figures['seconds']:6.1f} s"
        f" | out of memory {100 * figures['out_of_memory']:3.0f} %{held}"
    )


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """The means over all tables and budgets of as many devices, sampler by sampler."""
    by_devices: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for each in found:
        by_devices.setdefault(each["devices"], {}).setdefault(each["sampler"], []).append(each)
    lines = []
    for devices, by_name in sorted(by_devices.items()):
        problems = len(
            {(each["table"], each["budget_gib"]) for of_one in by_name.values() for each in of_one}
        )
        what = f"means over {problems} problems of {pluralize(devices, 'device')}"
        lines.append(f"{what}; regret after {', '.join(map(str, AT))} probes")
        lines += [line({**_mean(of_one), "sampler": name}) for name, of_one in by_name.items()]
        for after in ANSWERS_AT:
            when = f"after {after} probes" if after else "at its own end"
            lines.append(f"answers {when}: regret, mean (worst problem's mean, worst search)")
            lines += [answers_line(name, of_one, str(after)) for name, of_one in by_name.items()]
    return "\n".join(lines)


def answers_line(name: str, found: Sequence[Mapping[str, Any]], after: str) -> str:
    """What a sampler hands out, of all tiers and of each."""
    told = f"{name:12s}"
    for of in (ALL, *TIERS):
        problems = []
        for problem in found:
            regrets = [answers[of] for answers in problem["answers"][after] if of in answers]
            if regrets:
                problems.append(regrets)

        if problems:
            means = [100 * statistics.fmean(regrets) for regrets in problems]
            worst = 100 * max(map(max, problems))
            told += f" | {of} {statistics.fmean(means):4.1f} % ({max(means):4.1f}, {worst:4.1f})"

    probes = statistics.fmean(problem["probes"] for problem in found)
    out_of_memory = statistics.fmean(problem["out_of_memory"] for problem in found)
    return f"{told} | {probes:4.1f} probes, {100 * out_of_memory:3.0f} % out of memory"


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def over(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    numbers = (
        "close",
        "probes_until_close",
        "seconds_until_close",
        "probes",
        "seconds",
        "out_of_memory",
        "budget_gib",
    )
    bounds = [each["bound_held"] for each in found if each["bound_held"] is not None]
    mean: dict[str, Any] = {name: over(each[name] for each in found) for name in numbers}
    for name in ("mean_regret", "regret_95"):
        mean[name] = {str(at): over(each[name][str(at)] for each in found) for at in AT}
    return {**mean, "table": "all", "bound_held": over(bounds) if bounds else None}


if __name__ == "__main__":
    main()
