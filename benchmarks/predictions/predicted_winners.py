"""Whether predicted searches end at the best config: what one and two changes of a knob would gain, by the estimator.

`python -m benchmarks.predicted_winners [--models NAME ...] [--gpus NAME ...] [--seq-len N] [--out FILE]`; goes on with
what FILE lacks. Each search is one of the default space without a tolerance, so that its answers are the fastest and
not the most faithful of those too close to call. Then everything within two changes of each tier's answer is predicted.
What seems to be more than half a percent better is followed through a whole step, as the answer was, and counts where
it surely fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.core.config import Config
from autofit.core.options import search_options
from autofit.hardware.budgets import budget_for
from autofit.models import resolve
from autofit.tuning.context import ranking_for
from autofit.tuning.local_search import Merit, pairs_of
from autofit.tuning.predicted_space import Followed, Question, SpaceSearch
from autofit.tuning.space import space_for
from autofit.tuning.target import structure_traits, target_hardware

MODELS = (
    "tinyllama-1.1b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-2-13b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3-8b",
    "phi-1.5",
    "gpt2-xl",
)
GPUS = ("t4", "rtx-3060", "rtx-4090", "a100-40gb", "h100")
NOTICED = 0.005  # of the answer: a smaller gain is none
_MOST_FOLLOWED = 4  # of a tier, the best by rough figures


@dataclass(frozen=True)
class Row:
    """What changes of a tier's answer would gain, as shares of its objective."""

    model: str
    gpu: str
    tier: str
    single: float
    double: float
    by: dict[str, object]  # the knobs of the best change that surely fits
    seconds: float  # of the whole search
    neighbours: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, look around, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)

    rows: list[Row] = []
    if given.out and given.out.exists():
        rows = [Row(**row) for row in json.loads(given.out.read_text())]
    done = {(row.model, row.gpu) for row in rows}
    for model in given.models:
        for gpu in given.gpus:
            if (model, gpu) in done:
                continue
            for row in rows_of(model, gpu, given.seq_len):
                rows.append(row)
                print(line_of(row), flush=True)
            if given.out:
                plain = [dataclasses.asdict(row) for row in rows]
                given.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


def rows_of(model: str, gpu: str, seq_len: int | None) -> Iterator[Row]:
    """The rows of one search, by tier."""
    begin = time.monotonic()
    options = search_options(gpu=gpu, tolerance=0.0)
    hardware, _ = target_hardware(options)
    workload = resolve(model, sequence_length=seq_len)
    workload = dataclasses.replace(workload, traits=structure_traits(workload, hardware))
    budget = budget_for(options, hardware)
    with tempfile.TemporaryDirectory() as folder:
        question = Question(
            space_for(options, workload, hardware).knobs,
            hardware,
            budget,
            ranking_for(options),
            host_known=False,
            other_caps=(),
            progress=Path(folder) / "progress.json",
        )
        search = SpaceSearch(workload, question)
        answer = search.answer()
        seconds = time.monotonic() - begin

        for tier, best in answer.followed.items():
            if best[0].verdict != "yes":  # where nothing surely fits there is nothing to compare
                continue
            singles, doubles = around(search, best[0].config)
            single, by_one = gain(search, best, singles)
            double, by_two = gain(search, best, doubles)
            yield Row(
                model,
                gpu,
                tier,
                single,
                double,
                by_two if double > single else by_one,
                seconds,
                len(singles) + len(doubles),
            )


def around(search: SpaceSearch, config: Config) -> tuple[list[Config], list[Config]]:
    """What one change makes of a config, and what two make of it."""
    neighbours = search.local.neighbours
    changes = neighbours.changes(config)
    singles = {neighbours.changed(config, [change]): None for change in changes}
    doubles = {neighbours.changed(config, pair): None for pair in pairs_of(changes)}
    return (
        [found for found in singles if found],
        [found for found in doubles if found and found not in singles],
    )


def gain(
    search: SpaceSearch, best: Followed, configs: Sequence[Config]
) -> tuple[float, dict[str, object]]:
    """The largest gain over an answer among configs that surely fit, and the knobs that make it; 0 without one."""
    search.local.add(configs)
    rows = search.local.rows
    *place, value = search.merit(rows[best[0].config])

    def merit(config: Config) -> Merit:
        return search.merit(rows[config])

    noticed = (*place, value * (1 + NOTICED))
    better = [config for config in configs if merit(config) > noticed]
    better.sort(key=merit, reverse=True)
    found: tuple[float, dict[str, object]] = (0.0, {})
    for config in better[:_MOST_FOLLOWED]:
        followed = search.follow(config)
        if followed and followed[0].verdict == "yes":
            ratio = value_of(search, followed) / value_of(search, best) - 1
            changed = {name: config[name] for name in config.differences(best[0].config)}
            found = max(found, (ratio, changed), key=lambda pair: pair[0])
    return found


def value_of(search: SpaceSearch, followed: Followed) -> float:
    """What the objective says of an estimate."""
    estimate, _ = followed
    discount = search.question.ranking.objective.discount(estimate.config)
    return (estimate.samples_per_second or 0.0) / discount


def line_of(row: Row) -> str:
    """A row in words."""
    changes = ", ".join(f"{name} {value}" for name, value in row.by.items())
    return (
        f"{row.model} on {row.gpu}, {row.tier}: {row.single:.2%} by one change, {row.double:.2%} by two "
        f"{f'({changes}) ' if changes else ''}of {row.neighbours}; searched in {row.seconds:.0f} s"
    )


def summary(rows: Sequence[Row]) -> str:
    """The worst of each tier."""
    lines = []
    for tier in dict.fromkeys(row.tier for row in rows):
        of_tier = [row for row in rows if row.tier == tier]
        single = max(row.single for row in of_tier)
        double = max(row.double for row in of_tier)
        lines.append(
            f"{tier}: at most {single:.2%} by one change and {double:.2%} by two, in {len(of_tier)} searches"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
