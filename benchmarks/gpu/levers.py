"""Stage levers: what each one alone saves and costs, from the plain config of two kinds of training.

The rows are those of the stage memory: what that has measured is not measured again, and what is measured here has its
estimate too.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import CARD, SMOKE
from benchmarks.gpu.measured import STAGE as MEASURED
from benchmarks.gpu.measured import has_both, measure_all
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

PLAIN = CARD.levers[0].name


def run(bench: Bench) -> None:
    """Measure what is still missing of every lever alone."""
    measure_all(bench, bench.grid.one_at_a_time())


def rows_of(store: Store) -> list[dict[str, Any]]:
    """Every lever that was measured beside its plain config: the data that can be shown elsewhere.

    `saved_bytes` is of tensors, `device_saved_bytes` of all that the device holds; `slower` is the step time over the
    plain one's, less 1; `predicted_` what the estimator said of both.
    """
    grid = SMOKE if (store.get("about") or {}).get("smoke") else CARD
    cases = [(case, store.get(MEASURED, case.key)) for case in grid.one_at_a_time()]
    measured = [(case, row) for case, row in cases if row is not None and has_both(row)]
    plain = {(case.model, case.technique): row for case, row in measured if case.lever == PLAIN}
    return [
        {
            "model": case.model,
            "technique": case.technique,
            "lever": case.lever,
            "knobs": dict(case.knobs),
        }
        | _against(row, plain[case.model, case.technique])
        for case, row in measured
        if (case.model, case.technique) in plain
    ]


def _against(row: Row, plain: Row) -> dict[str, Any]:
    peak, before = row["measurement"]["peak_bytes"], plain["measurement"]["peak_bytes"]
    step, former = (
        row["measurement"]["step_seconds"]["median"],
        plain["measurement"]["step_seconds"]["median"],
    )
    predicted, foreseen = row["estimate"], plain["estimate"]
    times = (predicted["step_seconds"], foreseen["step_seconds"])
    return {
        "peak_bytes": peak["allocated"],
        "saved_bytes": before["allocated"] - peak["allocated"],
        "predicted_saved_bytes": foreseen["allocated_bytes"] - predicted["allocated_bytes"],
        "device_saved_bytes": before["device"] - peak["device"]
        if peak["device"] and before["device"]
        else None,
        "step_seconds": step,
        "slower": step / former - 1,
        "predicted_slower": times[0] / times[1] - 1 if all(times) else None,
    }


def summarize(store: Store) -> Summary:
    """One table for each kind of training."""
    rows = rows_of(store)
    head = ("lever", "peak, GiB", "saves, GiB", "predicted", "step, s", "slower by", "predicted")
    tables = [
        Table(
            f"Levers one at a time: {model}, {technique}",
            head,
            [_line(row) for row in rows if (row["model"], row["technique"]) == (model, technique)],
        )
        for model, technique in dict.fromkeys((row["model"], row["technique"]) for row in rows)
    ]
    return Summary({"levers": len(rows)} if rows else {}, tables)


def _line(row: dict[str, Any]) -> list[str | None]:
    predicted = row["predicted_slower"]
    return [
        row["lever"],
        f"{row['peak_bytes'] / 2**30:.3f}",
        f"{row['saved_bytes'] / 2**30:.3f}",
        f"{row['predicted_saved_bytes'] / 2**30:.3f}",
        f"{row['step_seconds']:.3f}",
        f"{row['slower']:+.0%}",
        None if predicted is None else f"{predicted:+.0%}",
    ]


LEVERS = Stage("levers", share=1.0, least_seconds=45.0, run=run, summarize=summarize)
