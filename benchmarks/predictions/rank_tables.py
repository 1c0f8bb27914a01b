"""How well predicted step times and peaks rank configs that were all measured: the tables of `searches/tables/`.

`python -m benchmarks.rank_tables [TABLE ...] [--out FILE]`: about half a minute a table. The rates are those of the
machine that measured the table, recorded beside it; one probe more or less shifts all predictions alike, so that the
ranks are those after a calibrating one. No rank can be told better than the table's own repeats agree on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autofit.estimate.rates import Rates
from autofit.estimate.space_estimator import SpaceEstimator
from benchmarks.estimate_space import spearman
from benchmarks.record_table import Row, Table, workload_named

TABLES = Path(__file__).parents[1] / "searches" / "tables"
WANTED = 0.9


def main(arguments: Sequence[str] | None = None) -> None:
    """Rank every table, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(TABLES.rglob("*.json")))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    found = {path.stem: figures(Table.read(path)) for path in given.tables}
    print(report(found))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def figures(table: Table) -> dict[str, Any]:
    """Correlations of ranks, and how far off the predictions are once the median one is right."""
    rows = [row for row in table.rows if row.step_seconds and row.peak_bytes]
    workload, rates = workload_named(table.about["model"]), Rates(**table.about["rates"])
    rough = SpaceEstimator(workload, table.hardware, rates, [row.config for row in rows]).predict()
    known = [place for place in range(len(rows)) if np.isfinite(rough.seconds[place])]
    measured = np.array([rows[place].step_seconds for place in known], float)
    predicted = rough.seconds[known]
    ratios = predicted / measured
    peaks = [float(rows[place].peak_bytes or 0) for place in known]
    best = int(np.argmin(measured))
    order = np.argsort(predicted)
    return {
        "configs": len(rows),
        "unknown": len(rows) - len(known),
        "seconds_spearman": spearman(predicted.tolist(), measured.tolist()),
        "bytes_spearman": spearman(rough.allocated[known].tolist(), peaks),
        "repeats_spearman": agreement([rows[place] for place in known]),
        "ratio_median": float(np.median(ratios)),
        "ratio_spread": float(np.percentile(ratios, 90) / np.percentile(ratios, 10)),
        "first_predicted_is_slower_by": float(measured[order[0]] / measured[best] - 1),
    }


def agreement(rows: Sequence[Row]) -> float | None:
    """The correlation of ranks of the first and the last time that every config was measured."""
    medians = [row.medians for row in rows]
    if min(map(len, medians)) < 2:
        return None
    return spearman([each[0] for each in medians], [each[-1] for each in medians])


def report(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each table."""
    head = f"{'table':14}{'configs':>9}{'step time':>11}{'(repeats)':>11}{'peak':>8}{'predicted/measured':>20}"
    lines = [f"correlations of ranks, wanted for the step time: {WANTED}", head]
    for name, each in found.items():
        repeats = "-" if each["repeats_spearman"] is None else f"{each['repeats_spearman']:.3f}"
        lines.append(
            f"{name:14}{each['configs']:9}{each['seconds_spearman']:11.3f}{repeats:>11}{each['bytes_spearman']:8.3f}"
            f"{each['ratio_median']:20.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
