"""What the search measured for one knob at a time: configs that differ from the best in a single value."""

from __future__ import annotations

from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import Result
from autofit.report.formatting import gib, peak_bytes, value
from autofit.report.rows import latest_by_config, relative_speed

_FOLLOWS = ("gradient_accumulation_steps",)  # from the knobs that are set
_MOST = 4


def single_changes(result: Result) -> tuple[str, ...]:
    """A line for each: `knob value: speed and peak against the best`, the fastest first, at most four.

    Nothing is said of knobs that were never measured apart.
    """
    if result.best is None:
        return ()
    found: list[tuple[float, str]] = []
    for other in latest_by_config(result).values():
        changed = [knob for knob in other.config.differences(result.best.config) if knob not in _FOLLOWS]
        if len(changed) == 1 and other.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY):
            speed = relative_speed(other, result) if other.fits else 0.0
            found.append((speed, f"{changed[0]} {value(other.config[changed[0]])}: {_figures(other, speed)}"))
    return tuple(text for _, text in sorted(found, key=lambda each: -each[0])[:_MOST])


def _figures(other: Measurement, speed: float) -> str:
    size = peak_bytes(other)
    if not other.fits:
        return "out of memory"
    return f"{speed:.2f} x the speed" + (f", peak {gib(size)} GiB" if size else "")
