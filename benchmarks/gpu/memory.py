"""Stage memory: what is predicted of 40 and more configs of four sizes of model, against what they take."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.core.measurement import Outcome
from benchmarks.gpu import figures
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Errors, Intervals
from benchmarks.gpu.measured import STAGE, measure_all
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

_HEAD = (
    "group",
    "configs",
    "allocated: median",
    "90 %",
    "worst",
    "bias",
    "reserved: median",
    "worst",
    "in interval",
    "width",
)


def run(bench: Bench) -> None:
    """Go through the mixed cases until enough of them are measured."""
    measure_all(bench, bench.grid.mixed(), wanted=bench.grid.wanted)


def summarize(store: Store) -> Summary:
    """Errors, intervals, and what could not be measured."""
    rows = store.rows(STAGE)
    groups = figures.by_lever(rows.values())
    table = Table(
        "Memory: predicted against measured",
        _HEAD,
        [_line(name, each) for name, each in groups.items()],
    )
    both = groups["all"]
    ran_out = [row for row in rows.values() if _outcome(row) == Outcome.OUT_OF_MEMORY.value]
    return Summary(
        _figures(both) | {"ran out of memory": len(ran_out)},
        [table] if both else [],
        list(_notes(rows.values())),
    )


def _figures(rows: list[Row]) -> dict[str, float]:
    pairs = figures.memory_pairs(rows)
    found: dict[str, float] = {"configs": len(rows)}
    for name in ("allocated", "reserved"):
        if errors := Errors.of(pairs[name]):
            found |= {
                f"{name} median": errors.median,
                f"{name} p90": errors.p90,
                f"{name} worst": errors.worst,
            }
    if intervals := Intervals.of(rows):
        found |= {
            "interval hit": intervals.hit,
            "interval width median": intervals.width_median,
            "interval width worst": intervals.width_worst,
            "above the interval": intervals.above,
            "below the interval": intervals.below,
        }
    return found


def _line(name: str, rows: list[Row]) -> list[str | None]:
    pairs = figures.memory_pairs(rows)
    allocated, reserved = Errors.of(pairs["allocated"]), Errors.of(pairs["reserved"])
    intervals = Intervals.of(rows)
    return [
        name,
        str(len(rows)),
        *(
            [f"{each:.2%}" for each in (allocated.median, allocated.p90, allocated.worst)]
            if allocated
            else [None] * 3
        ),
        f"{allocated.bias:+.2%}" if allocated else None,
        *([f"{reserved.median:.2%}", f"{reserved.worst:.2%}"] if reserved else [None] * 2),
        *([f"{intervals.hit:.0%}", f"{intervals.width_median:.1%}"] if intervals else [None] * 2),
    ]


def _notes(rows: Iterable[Row]) -> Iterable[str]:
    """Reasons for missing figures, each with the configs that it is of."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if reason := _reason(row):
            name = f"{row['model']} {row['technique']}, {row['lever']}"
            reasons.setdefault(reason.strip().splitlines()[-1], []).append(name)
    for reason, names in reasons.items():
        yield f"{'; '.join(names)}: {reason}"


def _reason(row: Row) -> str | None:
    for name in ("left_out", "failed", "not_estimated"):
        if name in row:
            return str(row[name])
    outcome = _outcome(row)
    return (
        None
        if outcome in (None, Outcome.FITS.value)
        else f"{outcome}: {row['measurement']['reason']}"
    )


def _outcome(row: Row) -> str | None:
    return row["measurement"]["outcome"] if "measurement" in row else None


MEMORY = Stage("memory", share=0.7, least_seconds=60.0, run=run, summarize=summarize)
