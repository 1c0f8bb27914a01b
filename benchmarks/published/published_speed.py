"""Predicted against published speed of training on one GPU: `python -m benchmarks.published_speed`.

Every judged row of data/published_speed.csv is what `autofit estimate` says of it: its model (or the same architecture)
and its knobs, on the catalogue's card. The others are listed with the reason. Nothing is fitted row by row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autofit import estimate
from autofit.core.workload import Workload
from benchmarks.published_report import Outcome, tell
from benchmarks.published_runs import (
    card_of,
    context_of,
    inexpressible,
    length_of,
    measured,
    rows,
    run_of,
    samples_of,
)

FACTOR = 1.35  # that 80 % of the rows are to be within


def outcome_of(row: dict[str, str]) -> Outcome:
    """Predict one row."""
    workload, config, _ = run_of(row)
    predicted = estimate(workload, config, gpu=card_of(row)).step_seconds
    assert predicted is not None, "cards of the catalogue have rates"
    return Outcome(row, work_of(row, workload), measured(row), predicted)


def work_of(row: dict[str, str], workload: Workload) -> float:
    """Tokens of one card's step, or samples where they have no length."""
    return samples_of(row) * (length_of(row) / context_of(row) if workload.unit == "tokens" else 1)


def main(arguments: list[str] | None = None) -> int:
    """Predict every judged row and print the tables and what they come to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_speed", description=__doc__
    )
    parser.add_argument("--only", default="", help="rows whose id begins so")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args(arguments)
    chosen = [row for row in rows("published_speed") if row["id"].startswith(given.only)]
    groups = {
        "By publisher and card": lambda each: each.group,
        "By card": lambda each: str(card_of(each.row)),
    }
    tell(chosen, outcome_of, inexpressible, factor=FACTOR, groups=groups, out=given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
