"""The table of all trials: a row for every probe, with what it sorts by and its log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autofit.core.measurement import Measurement
from autofit.core.record import Predicted, Record
from autofit.core.result import tier
from autofit.report.formatting import (
    OUTCOMES,
    TIER_TITLES,
    describe,
    gib,
    knobs_that_differ,
    number,
    peak_bytes,
    throughput,
)
from autofit.report.html.knob_names import off_knobs
from autofit.report.html.plot_data import unit
from autofit.report.rows import latest_by_config


@dataclass(frozen=True)
class Cell:
    """What is shown, what a column is sorted by, the CSS class, and a tooltip."""

    words: str
    key: float | str
    kind: str = "figure"
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """A row."""

    number: int
    cells: tuple[Cell, ...]
    best: bool
    log: str | None
    reason: str


def columns(record: Record) -> list[tuple[str, str]]:
    """(title, kind) of each column; those of predictions where there are any."""
    predicted = ("predicted GiB", "predicted step s") if record.predicted else ()
    figures = (f"{unit(record.result)}/s", "verified", "step s", "peak GiB", *predicted, "probe s")
    words = [(title, "words") for title in ("config", "trains", "outcome")]
    return [("#", "figure"), *words, *((title, "figure") for title in figures)]


def trials(record: Record, directory: Path) -> list[Trial]:
    """All trials in their order."""
    result, latest = record.result, latest_by_config(record.result)
    differing = knobs_that_differ(trial.config for trial in result.trials)
    rows = []
    for index, trial in enumerate(result.trials):
        predicted = record.predicted[index] if record.predicted else None
        log = f"probes/{trial.number:04d}.log"
        rows.append(
            Trial(
                trial.number,
                tuple(_cells(trial, latest[trial.config], differing, predicted)),
                best=result.best is not None and result.best.config == trial.config,
                log=log if (directory / log).is_file() else None,
                reason=(trial.reason or "").strip(),
            )
        )
    return rows


def shared(record: Record) -> str:
    """What is on in all trials, in a few words; empty where nothing is, or there is one."""
    trials = record.result.trials
    if len(trials) < 2:
        return ""
    others = (*off_knobs(trials[0].config), *knobs_that_differ(trial.config for trial in trials))
    on = [knob for knob in trials[0].config if knob not in others]
    return describe(trials[0].config, on) if on else ""


def _cells(trial: Measurement, latest: Measurement, differing: list[str], predicted: Predicted | None) -> list[Cell]:
    config, name, step = (
        describe(trial.config, differing) or describe(trial.config),
        tier(trial.config),
        trial.step_seconds,
    )
    interval = f"95 %: {step.low:.3g} to {step.high:.3g}" if step else ""
    rates = [throughput(one)[0] if shown else 0 for one, shown in ((trial, trial.fits), (latest, latest.verified))]
    figures = [
        *(_figure(rate, number(rate)) for rate in rates),
        _figure(step.median if step else 0, f"{step.median:.3g}" if step else "", interval),
        _figure(peak_bytes(trial), gib(peak_bytes(trial) or 0)),
    ]
    if predicted is not None:
        nbytes, seconds = predicted.allocated_bytes, predicted.step_seconds
        figures += [_figure(nbytes, gib(int(nbytes or 0))), _figure(seconds, f"{seconds or 0:.3g}")]
    return [
        _figure(trial.number + 1, str(trial.number + 1)),
        Cell(config, config, "config"),
        Cell(TIER_TITLES[name], name, name),
        Cell(OUTCOMES[trial.outcome], trial.outcome.value, "outcome"),
        *figures,
        Cell(f"{trial.seconds:.1f}", trial.seconds),
    ]


def _figure(figure: float | None, words: str, note: str = "") -> Cell:
    """A number; a missing one is blank and sorts last."""
    return Cell(words if figure else "", figure or 1e300, note=note)
