"""What each knob buys: a row for each, and in it the speed that its other values leave, all else as in the best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autofit.core.pareto import Alternative
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.formatting import OUTCOMES, gib, percent, source, value
from autofit.report.html.svg import Picture, Scale, width_of
from autofit.report.knob_effects import speed_left

_ROW, _TALL_ROW, _RADIUS = 25, 47, 4.0
_MOST = 1.6  # times the speed of the best; what is predicted beyond is drawn there

Row = tuple[str, list[tuple[Alternative, float]]]


def knob_picture(record: Record, width: int = 720) -> Picture | None:
    """The picture; None where nothing is known of single changes."""
    result = record.result
    rows = _rows(result)
    if result.best is None or not rows:
        return None
    wide = width > 500
    left = 210 if wide else 12
    row = _ROW if wide else _TALL_ROW
    height = row * len(rows) + 52
    picture = Picture(width, height, "Speed with one knob changed, against the best config", interactive=True)
    speeds = [min(speed, _MOST) for _, changes in rows for each, speed in changes if each.fits]
    across = Scale(0.0, max([1.0, *speeds]) * 1.12, left + 26, width - 40)
    _axis(picture, across, height - 30)
    for place, (knob, changes) in enumerate(rows):
        y = 14 + row * place + (row - _ROW) + _ROW / 2
        mine = f"{knob} {value(result.best.config[knob])}"
        picture.text(*((left - 6, y + 4) if wide else (4, y - 18)), mine, kind="knob", anchor="end" if wide else None)
        picture.line((left if wide else 4, y), (across.end, y), "rule")
        _marks(picture, across, y, changes, result)
    return picture


def _rows(result: Result) -> list[Row]:
    """The knobs, those first of which every change costs the most; those that change nothing are left out."""
    rows = []
    for knob, changes in itertools.groupby(result.alternatives, key=lambda each: each.knob):
        rated = [(each, speed_left(each, result)) for each in changes]
        rows.append((knob, sorted(rated, key=lambda each: each[1])))
    return sorted(rows, key=lambda row: max(speed for _, speed in row[1]))


def _axis(picture: Picture, across: Scale, bottom: float) -> None:
    for number in across.ticks(5):
        picture.text(across(number), bottom + 14, f"{number:g}\u00d7", anchor="middle", kind="tick")
    picture.line((across(1.0), 8), (across(1.0), bottom + 2), "leader")
    picture.text(across.end, bottom + 28, "speed against the best", anchor="end", kind="title")


def _marks(
    picture: Picture, across: Scale, y: float, changes: Sequence[tuple[Alternative, float]], result: Result
) -> None:
    free = across.start - 30.0  # where the last label ends
    misses = [each for each, _ in changes if not each.fits]
    if misses:
        words = ", ".join(value(each.value) for each in misses)
        _mark(picture, across.start - 14, y, misses[0], "; ".join(_told(each, 0.0, result) for each in misses))
        picture.text(across.start - 6, y - 4, words, kind="tick")
        free = across.start + width_of(words)
    for each, speed in (pair for pair in changes if pair[0].fits):
        x = across(min(speed, _MOST))
        _mark(picture, x, y, each, _told(each, speed, result))
        words = value(each.value)
        if x - 4 > free:
            picture.text(x - 3, y - 5.5, words, kind="tick")
            free = x + width_of(words)


def _mark(picture: Picture, x: float, y: float, each: Alternative, words: str) -> None:
    measured = "known" if each.measured else "believed"
    group = picture.draw("g", kind=f"change {measured if each.fits else 'misses'}", tabindex=-1)
    picture.draw("title", words, into=group)
    if each.fits:
        picture.draw("circle", into=group, cx=x, cy=y, r=_RADIUS)
    else:
        picture.draw("path", into=group, d=f"M{x - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6")


def _told(each: Alternative, speed: float, result: Result) -> str:
    words = f"{each.knob} {value(each.value)}: "
    if each.fits:
        words += f"{percent(speed)} of the best's speed"
    elif each.peak_bytes and not each.measured:
        words += f"would need {gib(result.budget.bytes_for(each.peak_bytes, result.hardware.device))} GiB"
    else:
        words += OUTCOMES[each.outcome]
    size = f", {gib(each.peak_bytes)} GiB" if each.fits and each.peak_bytes else ""
    return f"{words}{size} {source(each.measured)}"
