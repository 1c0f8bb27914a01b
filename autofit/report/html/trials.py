"""The table of all trials: a row for every probe, with what it sorts by and its log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autofit.core.measurement import Measurement
from autofit.core.record import Predicted, Record
from autofit.core.result import tier
from autofit.report.formatting import OUTCOMES, describe, gib, knobs_that_differ, number, peak_bytes
from autofit.report.html.knob_names import off_knobs
from autofit.report.html.plot_data import TITLES, unit
from autofit.report.rows import latest_by_config

_LAST = 1e300  # what has no figure comes after what has one


@dataclass(frozen=True)
class Cell:
    """What is shown, and what a column is sorted by."""

    words: str
    key: float | str
    kind: str = ""
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
    told = [("#", "figure"), ("config", "words"), ("trains", "words"), ("outcome", "words")]
    told += [
        (f"{unit(record.result)}/s", "figure"),
        ("verified", "figure"),
        ("step s", "figure"),
        ("peak GiB", "figure"),
    ]
    if record.predicted:
        told += [("predicted GiB", "figure"), ("predicted step s", "figure")]
    return [*told, ("probe s", "figure")]


def trials(record: Record, directory: Path) -> list[Trial]:
    """All trials in their order."""
    result = record.result
    differing = knobs_that_differ(each.config for each in result.trials)
    latest = latest_by_config(result)
    return [
        Trial(
            each.number,
            tuple(_cells(each, latest[each.config], differing, _predicted(record, place))),
            best=result.best is not None and result.best.config == each.config,
            log=_log(each.number, directory),
            reason=(each.reason or "").strip(),
        )
        for place, each in enumerate(result.trials)
    ]


def shared(record: Record) -> str:
    """What is on in all trials, in a few words; empty where nothing is, or there is one."""
    trials = record.result.trials
    if len(trials) < 2:
        return ""
    differing = knobs_that_differ(each.config for each in trials)
    off = (*off_knobs(trials[0].config), *differing)
    on = [knob for knob in trials[0].config if knob not in off]
    return describe(trials[0].config, on) if on else ""


def _predicted(record: Record, place: int) -> Predicted | None:
    return record.predicted[place] if record.predicted else None


def _cells(each: Measurement, latest: Measurement, differing: list[str], predicted: Predicted | None) -> list[Cell]:
    config = describe(each.config, differing) or describe(each.config)
    peak = peak_bytes(each)
    step = each.step_seconds
    interval = f"95 %: {step.low:.3g} to {step.high:.3g}" if step else ""
    cells = [
        _figure(each.number + 1, str(each.number + 1)),
        Cell(config, config, "config"),
        Cell(TITLES[tier(each.config)], tier(each.config), tier(each.config)),
        Cell(OUTCOMES[each.outcome], each.outcome.value, "outcome"),
        _rate(each if each.fits else None),
        _rate(latest if latest.verified else None),
        _figure(step.median if step else None, f"{step.median:.3g}" if step else "", note=interval),
        _figure(peak, gib(peak) if peak else ""),
    ]
    if predicted is not None:
        nbytes, seconds = predicted.allocated_bytes, predicted.step_seconds
        cells += [
            _figure(nbytes, gib(int(nbytes)) if nbytes else ""),
            _figure(seconds, f"{seconds:.3g}" if seconds else ""),
        ]
    return [*cells, _figure(each.seconds, f"{each.seconds:.1f}")]


def _rate(each: Measurement | None) -> Cell:
    rate = (each.tokens_per_second or each.samples_per_second) if each else None
    return _figure(rate, number(rate) if rate else "")


def _figure(key: float | None, words: str, note: str = "") -> Cell:
    return Cell(words, _LAST if key is None else key, "figure", note)


def _log(number: int, directory: Path) -> str | None:
    name = f"probes/{number:04d}.log"
    return name if (directory / name).is_file() else None
