"""The smaller pictures: what each knob buys, the search's progress, and predictions against measurements."""

import statistics
from collections.abc import Sequence
from itertools import accumulate

from autofit.core.errors import pluralize
from autofit.core.hardware import GIB
from autofit.core.pareto import Alternative
from autofit.core.record import Record
from autofit.core.result import Result, tier
from autofit.report.formatting import (
    OUTCOMES,
    describe,
    gib,
    listed,
    number,
    percent,
    source,
    value,
)
from autofit.report.html.scatter import Plotted, hover_text, leveled, link, plotted, shape, unit
from autofit.report.html.svg import At, Picture, Scale, steps, width_of
from autofit.report.knob_effects import Change, changes_by_knob
from autofit.report.rows import drawn_trials

_ROW, _TALL_ROW = 25, 47
_MOST = 1.6  # times the speed of the best; what is predicted beyond is drawn there
_FEWEST = 2  # dots that are worth axes


def knob_picture(record: Record, width: int = 720) -> Picture | None:
    """A row for each knob with the speed its other values leave, all else as in the best; None where none is known."""
    result = record.result
    if result.best is None or not result.alternatives:
        return None
    # Those first of which every change costs the most.
    rows = [
        (knob, sorted(changes, key=lambda change: change[1]))
        for knob, changes in changes_by_knob(result)
    ]
    rows.sort(key=lambda row: max(speed for _, speed in row[1]))
    wide = width > 500
    left, row_height = (210, _ROW) if wide else (12, _TALL_ROW)
    bottom = row_height * len(rows) + 22
    picture = Picture(
        width, bottom + 30, "Speed with one knob changed, against the best config", interactive=True
    )
    speeds = [min(speed, _MOST) for _, changes in rows for change, speed in changes if change.fits]
    across = Scale(0.0, max([1.0, *speeds]) * 1.12, left + 26, width - 40)
    for tick in across.ticks(5):
        picture.text(across(tick), bottom + 14, f"{tick:g}\u00d7", anchor="middle", kind="tick")
    picture.line((across(1.0), 8), (across(1.0), bottom + 2), "leader")
    picture.text(across.end, bottom + 28, "speed against the best", anchor="end", kind="title")
    for index, (knob, changes) in enumerate(rows):
        y = 14 + row_height * (index + 1) - _ROW / 2
        mine = f"{knob} {value(result.best.config.get(knob))}"
        picture.text(
            *((left - 6, y + 4) if wide else (4, y - 18)),
            mine,
            kind="knob",
            anchor="end" if wide else None,
        )
        picture.line((left if wide else 4, y), (across.end, y), "rule")
        _row_of_changes(picture, across, y, changes, result)
    return picture


def _row_of_changes(
    picture: Picture, across: Scale, y: float, changes: Sequence[Change], result: Result
) -> None:
    free = across.start - 30.0  # where the last label ends
    misses = [change for change, _ in changes if not change.fits]
    if misses:
        words = ", ".join(value(change.value) for change in misses)
        titles = "; ".join(_change_title(change, 0.0, result) for change in misses)
        _mark(picture, (across.start - 14, y), misses[0], titles)
        picture.text(across.start - 6, y - 4, words, kind="tick")
        free = across.start + width_of(words)
    for change, speed in changes:
        if change.fits:
            x = across(min(speed, _MOST))
            _mark(picture, (x, y), change, _change_title(change, speed, result))
            if x - 4 > free:
                picture.text(x - 3, y - 5.5, value(change.value), kind="tick")
                free = x + width_of(value(change.value))


def _mark(picture: Picture, at: At, change: Alternative, title: str) -> None:
    kind = ("known" if change.measured else "believed") if change.fits else "misses"
    group = picture.draw("g", kind=f"change {kind}", tabindex=-1)
    picture.draw("title", title, into=group)
    if change.fits:
        picture.draw("circle", into=group, cx=at[0], cy=at[1], r=4.0)
    else:
        picture.cross(at, 3, group)


def _change_title(change: Alternative, speed: float, result: Result) -> str:
    if change.fits:
        size = f", {gib(change.peak_bytes)} GiB" if change.peak_bytes else ""
        words = f"{percent(speed)} of the best's speed{size}"
    elif change.peak_bytes and not change.measured:
        words = f"would need {gib(result.budget.bytes_for(change.peak_bytes, result.hardware.device))} GiB"
    else:
        words = OUTCOMES[change.outcome]
    return f"{change.knob} {value(change.value)}: {words} {source(change.measured)}"


def progress(record: Record, by: str) -> Picture | None:
    """Every probe and the best so far, by "probe" or by "minute"; None where nothing fitted, or all took no time."""
    result, trials = record.result, record.result.trials
    seconds = list(accumulate(trial.seconds for trial in trials))
    if (
        len(trials) < 2
        or not any(trial.fits for trial in trials)
        or (by != "probe" and not seconds[-1] > 0)
    ):
        return None
    ends, title = [float(index) for index in range(1, len(trials) + 1)], "probes"
    if by != "probe":
        minutes = seconds[-1] >= 180
        ends = [end / 60 for end in seconds] if minutes else seconds
        title = f"{'minutes' if minutes else 'seconds'} of probing"
    rates = [leveled(trial, result) if trial.fits else 0.0 for trial in trials]
    picture = Picture(350, 240, f"Throughput of the best so far, by {title}", interactive=True)
    across, up = Scale(0.0, ends[-1], 52, 340), Scale(0.0, max(rates) * 1.08, 196, 30)
    picture.frame(across, up, titles=(title, f"{unit(result)}/s"), ticks=(5, 4))
    best_so_far = list(accumulate(rates, max))
    stair = []
    for place, best in enumerate(best_so_far):
        rises = place == 0 or best > best_so_far[place - 1]
        if best and (rises or place == len(trials) - 1):
            stair.append((across(ends[place]), up(best)))
    picture.draw("path", d=steps(stair) if len(stair) > 1 else "", kind="leading")
    for place in drawn_trials(result):
        end, rate, trial = ends[place], rates[place], trials[place]
        figure = f"{number(rate)} {unit(result)}/s" if trial.fits else OUTCOMES[trial.outcome]
        words = f"probe {trial.number + 1}: {describe(trial.config)} \u2014 {figure}"
        dot = link(picture, trial.number, words, f"dot small {tier(trial.config)}")
        if trial.fits:
            shape(picture, dot, tier(trial.config), (across(end), up(rate)), 3.0)
        else:
            picture.cross((across(end), up.start - 5), 2.5, dot, "cross")
    return picture


def devices_picture(record: Record, what: str) -> Picture | None:
    """The predicted "memory" of each device, or "speed" of all, against their number; None of fewer than two."""
    result = record.result
    points = [
        (each.devices, each.high / GIB if what == "memory" else each.rate)
        for each in result.on_devices
    ]
    known = [(devices, figure) for devices, figure in points if figure]
    if len(known) < _FEWEST:
        return None
    usable = result.budget.cap_bytes(result.hardware.device) / GIB
    title = "GiB of each device" if what == "memory" else f"{unit(result)}/s of all devices"
    across_title = "devices" if result.hardware.nodes == 1 else "devices of each node"
    picture = Picture(350, 240, f"Predicted {title}, by the number of {across_title}")
    most = max([figure for _, figure in known] + [usable] * (what == "memory"))
    across = Scale(0.0, known[-1][0] * 1.04, 52, 340, marked=tuple(devices for devices, _ in known))
    up = Scale(0.0, most * 1.08, 196, 30)
    picture.frame(across, up, titles=(across_title, title), ticks=(0, 6))
    if what == "memory":
        picture.line((across.start, up(usable)), (across.end, up(usable)), "budget")
        picture.text(across.end, up(usable) - 4, "usable", kind="budget-label", anchor="end")
    places = [(across(devices), up(figure)) for devices, figure in known]
    picture.draw("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places), kind="leading")
    for (devices, figure), (x, y) in zip(known, places, strict=True):
        dot = picture.draw(
            "circle", cx=x, cy=y, r=3.2 if devices == result.hardware.devices else 2.2, kind="peak"
        )
        picture.draw("title", f"{pluralize(devices, 'device')}: {number(figure)}", into=dot)
    return picture


def error_picture(record: Record, what: str) -> Picture | None:
    """A dot for each config's predicted and measured "memory" or "step"; None where too little was predicted."""
    pairs = _pairs(record, what)
    if len(pairs) < _FEWEST:
        return None
    title = {"memory": "peak of tensors, GiB", "step": "step, seconds"}[what]
    every = [figure for _, *both in pairs for figure in both]
    low, high = min(every) * 0.85, max(every) * 1.15
    picture = Picture(330, 330, f"Predicted against measured {title}", interactive=True)
    across = Scale(low, high, 50, 318, logarithmic=high > 4 * low)
    up = Scale(low, high, 286, 30, logarithmic=high > 4 * low)
    picture.frame(across, up, titles=(f"measured {title}", "predicted"), ticks=(4, 4))
    picture.line((across(low), up(low)), (across(high), up(high)), "same")
    for one, *both in pairs:
        predicted, measured = (
            f"{gib(int(each * GIB))} GiB" if what == "memory" else f"{each:.3g} s" for each in both
        )
        words = (
            f"{hover_text(one, record.result)} \u2014 {predicted} predicted, {measured} measured"
        )
        dot = link(picture, one.number, words, f"dot {one.tier}")
        shape(picture, dot, one.tier, (across(both[1]), up(both[0])), 3.6)
    return picture


def error_words(record: Record) -> str:
    """How far off predictions were, in a sentence; empty where there were none."""
    errors = []
    for what, words in (("memory", "memory"), ("step", "the step's time")):
        pairs = _pairs(record, what)
        if len(pairs) >= _FEWEST:
            off = statistics.median(
                abs(predicted / measured - 1) for _, predicted, measured in pairs
            )
            errors.append(f"{words} by {percent(off)}")
    return (
        f"Predicted before the first probe. The median prediction was off in {listed(errors)}."
        if errors
        else ""
    )


def _pairs(record: Record, what: str) -> list[tuple[Plotted, float, float]]:
    """The configs with what was predicted and measured of them: GiB of tensors, or seconds of a step."""
    pairs = []
    for one in plotted(record):
        peak, step = one.measurement.peak_bytes, one.measurement.step_seconds
        if what == "step":
            predicted, measured = one.predicted.step_seconds, step.median if step else None
        else:
            predicted = (one.predicted.allocated_bytes or 0) / GIB
            measured = peak.allocated / GIB if peak and one.measurement.fits else None
        if predicted and measured:
            pairs.append((one, predicted, measured))
    return pairs
