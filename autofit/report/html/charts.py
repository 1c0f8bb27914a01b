"""The smaller pictures: what each knob buys, the search's progress, and predictions against
measurements."""

import statistics
from collections.abc import Sequence
from itertools import accumulate

from autofit.core.errors import pluralize
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
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
from autofit.report.html.scatter import Plotted, hover_text, leveled, link, plotted, shape
from autofit.report.html.svg import At, Picture, Scale, polyline, steps, width_of
from autofit.report.knob_effects import Change, budget_words, changes_by_knob
from autofit.report.rows import drawn_trials

_ROW = 25  # pixels of a knob
_TALL_ROW = 47  # where its name has a line of its own
_MOST = 1.6  # times the speed of the best; what is predicted beyond is drawn there
_FEWEST = 2  # dots that are worth axes


def knob_picture(record: Record, width: int = 720) -> Picture | None:
    """A row for each knob with the speed its other values leave, all else as in the best.

    None where none is known.
    """
    result = record.result
    if result.best is None or not result.alternatives:
        return None

    rows = []
    speeds = [1.0]
    for knob, changes in changes_by_knob(result):
        changes.sort(key=lambda change: change[1])
        rows.append((knob, changes))
        for change, speed in changes:
            if change.fits:
                speeds.append(min(speed, _MOST))

    rows.sort(key=lambda row: row[1][-1][1])  # those first of which every change costs the most

    is_wide = width > 500
    left = 12
    row_height = _TALL_ROW
    if is_wide:
        left = 210  # the names stand there
        row_height = _ROW

    bottom = row_height * len(rows) + 22
    label = "Speed with one knob changed, against the best config"
    picture = Picture(width, bottom + 30, label, interactive=True)

    across = Scale(0.0, max(speeds) * 1.12, left + 26, width - 40)
    for tick in across.ticks(5):
        picture.text(across(tick), bottom + 14, f"{tick:g}\u00d7", anchor="middle", kind="tick")
    picture.line((across(1.0), 8), (across(1.0), bottom + 2), "leader")
    picture.text(across.end, bottom + 28, "speed against the best", anchor="end", kind="title")

    for index, (knob, changes) in enumerate(rows, 1):
        y = 14 + row_height * index - _ROW / 2
        name = f"{knob} {value(result.best.config.get(knob))}"
        if is_wide:
            picture.text(left - 6, y + 4, name, kind="knob", anchor="end")
            picture.line((left, y), (across.end, y), "rule")
        else:
            picture.text(4, y - 18, name, kind="knob")
            picture.line((4, y), (across.end, y), "rule")

        _row_of_changes(picture, across, y, changes, result)

    return picture


def _row_of_changes(
    picture: Picture,
    across: Scale,
    y: float,
    changes: Sequence[Change],
    result: Result,
) -> None:
    """Draw the changes of a knob, with their values where there is room for them."""
    free = across.start - 30.0  # where the last label ends
    misses = [change for change, _ in changes if not change.fits]
    if misses:  # one mark for all of them
        words = ", ".join(value(change.value) for change in misses)
        titles = "; ".join(_change_title(change, 0.0, result) for change in misses)
        _mark(picture, (across.start - 14, y), misses[0], titles)
        picture.text(across.start - 6, y - 4, words, kind="tick")
        free = across.start + width_of(words)

    for change, speed in changes:
        if not change.fits:
            continue
        x = across(min(speed, _MOST))
        _mark(picture, (x, y), change, _change_title(change, speed, result))
        if x - 4 > free:
            words = value(change.value)
            picture.text(x - 3, y - 5.5, words, kind="tick")
            free = x + width_of(words)


def _mark(
    picture: Picture,
    at: At,
    change: Alternative,
    title: str,
) -> None:
    if not change.fits:
        group = picture.titled("g", title, kind="change misses", tabindex=-1)
        picture.cross(at, 3, group)
        return

    x, y = at
    kind = "known" if change.measured else "believed"
    group = picture.titled("g", title, kind=f"change {kind}", tabindex=-1)
    picture.draw(
        "circle",
        into=group,
        cx=x,
        cy=y,
        r=4.0,
    )


def _change_title(change: Alternative, speed: float, result: Result) -> str:
    if change.fits:
        words = f"{percent(speed)} of the best's speed"
        if change.peak_bytes:
            words += f", {gib(change.peak_bytes)} GiB"
    elif change.peak_bytes and not change.measured:
        words = budget_words(change.peak_bytes, result)
    else:
        words = OUTCOMES[change.outcome]

    return f"{change.knob} {value(change.value)}: {words} {source(change.measured)}"


def progress(record: Record, by: str) -> Picture | None:
    """Every probe and the best so far; None where nothing fitted, or all took no time.

    Args:
        by: "probe" or "minute".
    """
    result = record.result
    trials = result.trials
    if len(trials) < 2 or not any(trial.fits for trial in trials):
        return None

    title = "probes"
    ends = list(map(float, range(1, len(trials) + 1)))
    if by != "probe":
        title = "seconds of probing"
        ends = list(accumulate(trial.seconds for trial in trials))
        if not ends[-1] > 0:
            return None
        if ends[-1] >= 180:
            title = "minutes of probing"
            ends = [end / 60 for end in ends]

    rates = [0.0] * len(trials)
    for place, trial in enumerate(trials):
        if trial.fits:
            rates[place] = leveled(trial, result)

    across = Scale(0.0, ends[-1], 52, 340)
    up = Scale(0.0, max(rates) * 1.08, 196, 30)
    picture = Picture(350, 240, f"Throughput of the best so far, by {title}", interactive=True)
    picture.frame(across, up, titles=(title, f"{result.unit}/s"), ticks=(5, 4))

    stair = []
    before = 0.0
    last = len(trials) - 1
    for place, best in enumerate(accumulate(rates, max)):
        if best > before or (best and place == last):
            stair.append((across(ends[place]), up(best)))
        before = best

    path = steps(stair) if len(stair) > 1 else ""
    picture.draw("path", d=path, kind="leading")

    for place in drawn_trials(result):
        trial = trials[place]
        x = across(ends[place])
        name = tier(trial.config)
        title = _probe_title(trial, rates[place], result)
        dot = link(picture, trial.number, title, f"dot small {name}")
        if trial.fits:
            shape(picture, dot, name, (x, up(rates[place])), 3.0)
        else:
            picture.cross((x, up.start - 5), 2.5, dot, "cross")

    return picture


def _probe_title(trial: Measurement, rate: float, result: Result) -> str:
    figure = OUTCOMES[trial.outcome]
    if trial.fits:
        figure = f"{number(rate)} {result.unit}/s"
    return f"probe {trial.number + 1}: {describe(trial.config)} \u2014 {figure}"


def devices_picture(record: Record, what: str) -> Picture | None:
    """What is predicted by the number of devices; None of fewer than two.

    Args:
        what: "memory" of each device, or "speed" of all.
    """
    result = record.result
    hardware = result.hardware
    figures = {}
    for prediction in result.on_devices:
        figure = prediction.rate
        if what == "memory":
            figure = prediction.high / GIB
        if figure:
            figures[prediction.devices] = figure

    if len(figures) < _FEWEST:
        return None

    across_title = "devices"
    if hardware.nodes != 1:
        across_title = "devices of each node"
    usable = result.budget.cap_bytes(hardware.device) / GIB
    most = max(figures.values())
    title = f"{result.unit}/s of all devices"
    if what == "memory":
        most = max(most, usable)
        title = "GiB of each device"

    marked = tuple(figures)
    across = Scale(0.0, marked[-1] * 1.04, 52, 340, marked=marked)
    up = Scale(0.0, most * 1.08, 196, 30)
    picture = Picture(350, 240, f"Predicted {title}, by the number of {across_title}")
    picture.frame(across, up, titles=(across_title, title), ticks=(0, 6))
    if what == "memory":
        y = up(usable)
        picture.line((across.start, y), (across.end, y), "budget")
        picture.text(across.end, y - 4, "usable", kind="budget-label", anchor="end")

    places = {devices: (across(devices), up(figure)) for devices, figure in figures.items()}
    picture.draw("path", d=polyline(places.values()), kind="leading")
    for devices, (x, y) in places.items():
        radius = 3.2 if devices == hardware.devices else 2.2
        words = f"{pluralize(devices, 'device')}: {number(figures[devices])}"
        picture.titled(
            "circle",
            words,
            cx=x,
            cy=y,
            r=radius,
            kind="peak",
        )

    return picture


def error_picture(record: Record, what: str) -> Picture | None:
    """A dot for each config's predicted and measured "memory" or "step"; None where too little was
    predicted."""
    pairs = _pairs(record, what)
    if len(pairs) < _FEWEST:
        return None

    figures: list[float] = []
    for _, *both in pairs:
        figures += both
    low = min(figures) * 0.85
    high = max(figures) * 1.15
    is_logarithmic = high > 4 * low
    across = Scale(low, high, 50, 318, logarithmic=is_logarithmic)
    up = Scale(low, high, 286, 30, logarithmic=is_logarithmic)

    title = "peak of tensors, GiB" if what == "memory" else "step, seconds"
    picture = Picture(330, 330, f"Predicted against measured {title}", interactive=True)
    picture.frame(across, up, titles=(f"measured {title}", "predicted"), ticks=(4, 4))
    picture.line((across(low), up(low)), (across(high), up(high)), "same")

    for config, predicted, measured in pairs:
        words = f"{_figure(predicted, what)} predicted, {_figure(measured, what)} measured"
        words = f"{hover_text(config, record.result)} \u2014 {words}"
        dot = link(picture, config.number, words, f"dot {config.tier}")
        shape(picture, dot, config.tier, (across(measured), up(predicted)), 3.6)

    return picture


def _figure(figure: float, what: str) -> str:
    if what == "memory":
        return f"{gib(int(figure * GIB))} GiB"
    return f"{figure:.3g} s"


def error_words(record: Record) -> str:
    """How far off predictions were, in a sentence; empty where there were none."""
    errors = []
    for what, words in (("memory", "memory"), ("step", "the step's time")):
        pairs = _pairs(record, what)
        if len(pairs) >= _FEWEST:
            off = [abs(predicted / measured - 1) for _, predicted, measured in pairs]
            errors.append(f"{words} by {percent(statistics.median(off))}")

    if not errors:
        return ""

    median = f"The median prediction was off in {listed(errors)}."
    return f"Predicted before the first probe. {median}"


def _pairs(record: Record, what: str) -> list[tuple[Plotted, float, float]]:
    """The configs with what was predicted and measured of them: GiB of tensors, or seconds of a
    step."""
    pairs = []
    for config in plotted(record):
        measurement = config.measurement
        measured = None
        if what == "step":
            predicted = config.predicted.step_seconds
            if measurement.step_seconds:
                measured = measurement.step_seconds.median
        else:
            predicted = (config.predicted.allocated_bytes or 0) / GIB
            if measurement.peak_bytes and measurement.fits:
                measured = measurement.peak_bytes.allocated / GIB

        if predicted and measured:
            pairs.append((config, predicted, measured))

    return pairs
