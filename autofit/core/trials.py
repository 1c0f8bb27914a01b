"""Trials as a table: one row a measurement, one column a knob or a figure, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from autofit.core.errors import InputError
from autofit.core.measurement import Measurement

_FIGURES = ("tokens_per_second", "samples_per_second", "loss", "seconds", "build_seconds", "compile_seconds", "steps")


def rows(trials: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One mapping a trial, all with the same names; None where a figure was not seen. Sizes are bytes."""
    knobs = list(dict.fromkeys(knob for trial in trials for knob in trial.config))
    return [_row(trial, knobs) for trial in trials]


def to_csv(trials: Sequence[Measurement]) -> str:
    """The same as text, with a line of names; what was not seen is empty."""
    table = rows(trials)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["number"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_dataframe(trials: Sequence[Measurement]) -> Any:
    """The same as a pandas.DataFrame.

    Raises:
        InputError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("a data frame needs pandas, which is not installed.", "pip install pandas") from error
    return pandas.DataFrame(rows(trials))


def _row(trial: Measurement, knobs: Sequence[str]) -> dict[str, Any]:
    steps, peak = trial.step_seconds, trial.peak_bytes
    return {
        "number": trial.number,
        **{knob: trial.config.get(knob) for knob in knobs},
        "outcome": trial.outcome.value,
        "step_seconds": steps and steps.median,
        "step_seconds_low": steps and steps.low,
        "step_seconds_high": steps and steps.high,
        **{name: getattr(trial, name) for name in _FIGURES},
        "allocated_bytes": peak and peak.allocated,
        "reserved_bytes": peak and peak.reserved,
        "device_bytes": peak and peak.device,
        "verified": trial.verified,
        "reason": trial.reason,
    }
