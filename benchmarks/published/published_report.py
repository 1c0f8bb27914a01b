"""How published speeds are told beside predicted ones: by row, by group, by card."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SURE = 1.15  # of two configs that differ by less, neither is the faster one


@dataclass(frozen=True)
class Outcome:
    """One row: seconds of a step as measured and predicted, and what a card does in one."""

    row: dict[str, str]
    work: float  # tokens (or samples, where the unit is not tokens) of one card's step
    measured: float
    predicted: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured speed: above 1 it was promised too fast."""
        return self.measured / self.predicted

    @property
    def group(self) -> str:
        return f"{self.row['source'].partition('@')[0]}, {self.row['n_gpus']} x {self.row['gpu']}"


def within(ratios: Iterable[float], factor: float) -> float:
    """The share of ratios that are no further from 1."""
    sizes = [abs(math.log(ratio)) <= math.log(factor) for ratio in ratios]
    return sum(sizes) / len(sizes)


def median_factor(ratios: Iterable[float]) -> float:
    """How far half of them are from 1, whichever way."""
    return math.exp(statistics.median(abs(math.log(ratio)) for ratio in ratios))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than four."""
    if len(one) < 4:
        return None
    ranks = [
        [sum(each < value for each in seen) + sum(each <= value for each in seen) for value in seen]
        for seen in (one, other)
    ]
    return statistics.correlation(*ranks)


def pairs_named(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """(pairs of one model and machine that differ, those of which the faster one is predicted to be it)."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[each.row["model"], each.group].append(each)
    pairs = right = 0
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            measured = (one.work / one.measured) / (other.work / other.measured)
            if max(measured, 1 / measured) > SURE:
                predicted = (one.work / one.predicted) / (other.work / other.predicted)
                pairs, right = pairs + 1, right + ((measured > 1) == (predicted > 1))
    return pairs, right


def figures(outcomes: Sequence[Outcome], factor: float) -> dict[str, Any]:
    """What the outcomes come to."""
    ratios = [each.ratio for each in outcomes]
    speeds = [
        [each.work / each.measured for each in outcomes],
        [each.work / each.predicted for each in outcomes],
    ]
    pairs, right = pairs_named(outcomes)
    return {
        "rows": len(outcomes),
        "median_factor": median_factor(ratios),
        "bias": math.exp(statistics.fmean(map(math.log, ratios))),
        "worst": max(ratios, key=lambda ratio: abs(math.log(ratio))),
        f"within_{factor:g}": within(ratios, factor),
        "rank_correlation": rank_correlation(*speeds),
        "pairs": pairs,
        "pairs_right": right,
    }


def told(row: dict[str, str]) -> str:
    """What a row trains, and how, in a few words."""
    parts = (
        row["method"],
        row["quant"].replace("none", ""),
        f"{row['micro_batch']} x {row['seq_len'] or '?'}",
    )
    return ", ".join(filter(None, (*parts, "compiled" if row["compile"] == "yes" else "")))


def rows_table(outcomes: Sequence[Outcome]) -> str:
    """Every row, in tokens (or samples) a second of one card."""
    lines = [
        "| row | model | config | measured | predicted | ratio | note |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for each in outcomes:
        row = each.row
        cells = (
            row["id"],
            row["model"],
            told(row),
            f"{each.work / each.measured:.0f}",
            f"{each.work / each.predicted:.0f}",
        )
        lines.append("| " + " | ".join((*cells, f"{each.ratio:.2f}", each.note)) + " |")
    return "\n".join(lines)


def groups_table(outcomes: Sequence[Outcome], factor: float, key: Callable[[Outcome], str]) -> str:
    """Figures by group, and of all."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[key(each)].append(each)
    heads = (
        "group",
        "rows",
        "median factor",
        "bias",
        "worst",
        f"within {factor:g}",
        "rank correlation",
        "pairs named",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, members in [*sorted(groups.items()), ("all", list(outcomes))]:
        found = figures(members, factor)
        correlation = (
            "-" if found["rank_correlation"] is None else f"{found['rank_correlation']:.2f}"
        )
        named = f"{found['pairs_right']} of {found['pairs']}" if found["pairs"] else "-"
        cells = [
            f"{found['rows']}",
            f"{found['median_factor']:.2f}",
            f"{found['bias']:.2f}",
            f"{found['worst']:.2f}",
        ]
        cells += [f"{found[f'within_{factor:g}']:.0%}", correlation, named]
        lines.append("| " + " | ".join((name, *cells)) + " |")
    return "\n".join(lines)


def left_out(
    rows: Sequence[dict[str, str]], why_not: Callable[[dict[str, str]], str | None]
) -> str:
    """The rows without a prediction, by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if reason := why_not(row):
            reasons[reason].append(row["id"])
    lines = [
        f"- {reason}: {len(ids)} ({ids[0]} to {ids[-1]})" for reason, ids in sorted(reasons.items())
    ]
    return "Not judged:\n" + "\n".join(lines)


def tell(
    chosen: Sequence[dict[str, str]],
    outcome_of: Callable[[dict[str, str]], Outcome],
    inexpressible: Callable[[dict[str, str]], str | None],
    *,
    factor: float,
    groups: dict[str, Callable[[Outcome], str]],
    out: Path | None,
) -> None:
    """Predict every judged row and print the tables, each grouping under its title; `out`: for the figures, as JSON."""
    outcomes = [outcome_of(row) for row in chosen if inexpressible(row) is None]
    print(rows_table(outcomes))
    for title, group in groups.items():
        print(f"\n{title}:\n{groups_table(outcomes, factor, group)}")
    print(f"\n{left_out(chosen, inexpressible)}")
    if out:
        out.write_text(json.dumps(figures(outcomes, factor), indent=1) + "\n")
