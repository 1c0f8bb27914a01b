"""How predictions compare with measurements: a dot for each config, on the line where both are the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from autofit.core.hardware import GIB
from autofit.core.record import Record
from autofit.report.formatting import gib, listed, percent
from autofit.report.html.plot_data import Plotted, plotted, told
from autofit.report.html.scatter import shape
from autofit.report.html.svg import Picture, Scale

_SIZE = 330
_FEWEST = 2  # dots that are worth axes

Pair = tuple[Plotted, float, float]  # predicted, measured


def memory_agreement(record: Record) -> Picture | None:
    """Bytes of tensors; None where too little was predicted."""
    pairs = [(one, a / GIB, b / GIB) for one, a, b in _pairs(record, _bytes)]
    return _picture(record, pairs, "peak of tensors, GiB", lambda size: f"{gib(int(size * GIB))} GiB")


def step_agreement(record: Record) -> Picture | None:
    """Seconds of a step; None where too little was predicted."""
    return _picture(record, _pairs(record, _seconds), "step, seconds", lambda seconds: f"{seconds:.3g} s")


def agreement_words(record: Record) -> str:
    """How far off predictions were, in a sentence; empty where there were none."""
    told = []
    for pairs, what in ((_pairs(record, _bytes), "memory"), (_pairs(record, _seconds), "the step's time")):
        if len(pairs) >= _FEWEST:
            off = statistics.median(abs(predicted / measured - 1) for _, predicted, measured in pairs)
            told.append(f"{what} by {percent(off)}")
    if not told:
        return ""
    return f"Predicted before the first probe. The median prediction was off in {listed(told)}."


def _bytes(one: Plotted) -> tuple[float | None, float | None]:
    peak = one.measurement.peak_bytes
    return one.predicted.allocated_bytes, peak.allocated if peak and one.measurement.fits else None


def _seconds(one: Plotted) -> tuple[float | None, float | None]:
    steps = one.measurement.step_seconds
    return one.predicted.step_seconds, steps.median if steps else None


def _pairs(record: Record, figures: Callable[[Plotted], tuple[float | None, float | None]]) -> list[Pair]:
    both = ((one, *figures(one)) for one in plotted(record))
    return [(one, predicted, measured) for one, predicted, measured in both if predicted and measured]


def _picture(record: Record, pairs: list[Pair], title: str, words: Callable[[float], str]) -> Picture | None:
    if len(pairs) < _FEWEST:
        return None
    every = [each for _, *both in pairs for each in both]
    low, high = min(every) * 0.85, max(every) * 1.15
    picture = Picture(_SIZE, _SIZE, f"Predicted against measured {title}", interactive=True)
    across = Scale(low, high, 50, _SIZE - 12, logarithmic=high > 4 * low)
    up = Scale(low, high, _SIZE - 44, 30, logarithmic=high > 4 * low)
    picture.frame(across, up, titles=(f"measured {title}", "predicted"), ticks=(4, 4))
    picture.line((across(low), up(low)), (across(high), up(high)), "same")
    for one, predicted, measured in pairs:
        link = picture.draw("a", href=f"#trial-{one.number}", kind=f"dot {one.tier}", tabindex=-1)
        figures = f"{words(predicted)} predicted, {words(measured)} measured"
        picture.draw("title", f"{told(one, record.result)} \u2014 {figures}", into=link)
        shape(picture, link, one.tier, (across(measured), up(predicted)), 3.6)
    return picture
