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
from autofit.report.html.svg import Picture, Plot, Scale, polyline, steps, width_of
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
    most = 1.0
    for knob, changes in changes_by_knob(result):
        changes.sort(key=lambda change: change[1])
        rows.append((knob, changes))
        for change, speed in changes:
            if change.fits:
                most = max(most, min(speed, _MOST))

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

    across = Scale(0.0, most * 1.12, left + 26, width - 40)
    for tick in across.ticks(5):
        picture.text(
            across(tick),
            bottom + 14,
            f"{tick:g}\u00d7",
            anchor="middle",
            kind="tick",
        )

    best = across(1.0)
    picture.line((best, 8), (best, bottom + 2), "leader")
    picture.text(
        across.end,
        bottom + 28,
        "speed against the best",
        anchor="end",
        kind="title",
    )

    y = 14 - _ROW / 2
    for knob, changes in rows:
        y += row_height
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
    left = across.start
    free = left - 30.0  # where the last label ends

    misses = [change for change, _ in changes if not change.fits]
    if misses:  # one mark for all of them
        titles = [_change_title(change, 0.0, result) for change in misses]
        group = picture.titled("g", "; ".join(titles), kind="change misses", tabindex=-1)
        picture.cross((left - 14, y), 3, group)

        words = ", ".join(value(change.value) for change in misses)
        picture.text(left - 6, y - 4, words, kind="tick")
        free = left + width_of(words)

    for change, speed in changes:
        if not change.fits:
            continue

        kind = "change believed"
        if change.measured:
            kind = "change known"
        x = across(min(speed, _MOST))
        title = _change_title(change, speed, result)
        group = picture.titled("g", title, kind=kind, tabindex=-1)
        picture.circle((x, y), 4.0, into=group)

        if x - 4 > free:
            words = value(change.value)
            picture.text(x - 3, y - 5.5, words, kind="tick")
            free = x + width_of(words)


def _change_title(change: Alternative, speed: float, result: Result) -> str:
    """A change, its speed and memory, and where they come from."""
    peak = change.peak_bytes
    if change.fits:
        words = f"{percent(speed)} of the best's speed"
        if peak:
            words += f", {gib(peak)} GiB"
    elif peak and not change.measured:
        words = budget_words(peak, result)
    else:
        words = OUTCOMES[change.outcome]

    setting = f"{change.knob} {value(change.value)}"
    return f"{setting}: {words} {source(change.measured)}"


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
    ends = [float(place + 1) for place in range(len(trials))]
    if by != "probe":
        title = "seconds of probing"
        ends = list(accumulate(trial.seconds for trial in trials))
        if not ends[-1] > 0:
            return None
        if ends[-1] >= 180:
            title = "minutes of probing"
            ends = [end / 60 for end in ends]

    rates = []
    for trial in trials:
        rate = 0.0
        if trial.fits:
            rate = leveled(trial, result)
        rates.append(rate)

    plot = Plot(
        (350, 240),
        f"Throughput of the best so far, by {title}",
        across=Scale(0.0, ends[-1], 52, 340),
        up=Scale(0.0, max(rates) * 1.08, 196, 30),
        interactive=True,
    )
    plot.frame((title, f"{result.unit}/s"), ticks=(5, 4))

    stair = []
    before = 0.0
    last = len(rates) - 1
    for place, best in enumerate(accumulate(rates, max)):
        if best > before or (best and place == last):
            stair.append(plot.at(ends[place], best))
        before = best

    path = ""
    if len(stair) > 1:
        path = steps(stair)
    plot.path(path, "leading")

    for place in drawn_trials(result):
        trial = trials[place]
        rate = rates[place]
        x, y = plot.at(ends[place], rate)
        name = tier(trial.config)
        dot = link(
            plot,
            trial.number,
            _probe_title(trial, rate, result),
            f"dot small {name}",
        )
        if trial.fits:
            shape(plot, dot, name, (x, y), 3.0)
        else:
            plot.cross((x, plot.up.start - 5), 2.5, dot, "cross")

    return plot


def _probe_title(trial: Measurement, rate: float, result: Result) -> str:
    """A probe, its config, and its speed or outcome."""
    figure = OUTCOMES[trial.outcome]
    if trial.fits:
        figure = f"{number(rate)} {result.unit}/s"

    label = f"probe {trial.number + 1}"
    config = describe(trial.config)
    return f"{label}: {config} \u2014 {figure}"


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
    highest = max(figures.values())
    title = f"{result.unit}/s of all devices"
    if what == "memory":
        highest = max(highest, usable)
        title = "GiB of each device"

    counts = tuple(figures)
    plot = Plot(
        (350, 240),
        f"Predicted {title}, by the number of {across_title}",
        across=Scale(0.0, counts[-1] * 1.04, 52, 340, marked=counts),
        up=Scale(0.0, highest * 1.08, 196, 30),
    )
    plot.frame((across_title, title), ticks=(0, 6))
    if what == "memory":
        left = plot.across.start
        right = plot.across.end
        y = plot.up(usable)
        plot.line((left, y), (right, y), "budget")
        plot.text(right, y - 4, "usable", kind="budget-label", anchor="end")

    places = {}
    for devices, figure in figures.items():
        places[devices] = plot.at(devices, figure)
    plot.path(polyline(places.values()), "leading")

    for devices, (x, y) in places.items():
        radius = 2.2
        if devices == hardware.devices:
            radius = 3.2
        words = f"{pluralize(devices, 'device')}: {number(figures[devices])}"
        plot.titled(
            "circle",
            words,
            cx=x,
            cy=y,
            r=radius,
            kind="peak",
        )

    return plot


def error_picture(record: Record, what: str) -> Picture | None:
    """A dot for each config's predicted and measured "memory" or "step"; None where too little was
    predicted."""
    pairs = _pairs(record, what)
    if len(pairs) < _FEWEST:
        return None

    figures: list[float] = []
    for _, predicted, measured in pairs:
        figures += (predicted, measured)

    low = min(figures) * 0.85
    high = max(figures) * 1.15
    is_logarithmic = high > 4 * low

    title = "step, seconds"
    if what == "memory":
        title = "peak of tensors, GiB"
    plot = Plot(
        (330, 330),
        f"Predicted against measured {title}",
        across=Scale(low, high, 50, 318, logarithmic=is_logarithmic),
        up=Scale(low, high, 286, 30, logarithmic=is_logarithmic),
        interactive=True,
    )
    plot.frame((f"measured {title}", "predicted"), ticks=(4, 4))
    plot.line(plot.at(low, low), plot.at(high, high), "same")

    for dot, predicted, measured in pairs:
        figure = f"{_figure(predicted, what)} predicted, {_figure(measured, what)} measured"
        words = f"{hover_text(dot, record.result)} \u2014 {figure}"
        element = link(plot, dot.number, words, f"dot {dot.tier}")
        shape(plot, element, dot.tier, plot.at(measured, predicted), 3.6)

    return plot


def _figure(figure: float, what: str) -> str:
    """GiB or seconds with their unit."""
    if what == "memory":
        return f"{gib(int(figure * GIB))} GiB"
    return f"{figure:.3g} s"


def error_words(record: Record) -> str:
    """How far off predictions were, in a sentence; empty where there were none."""
    errors = []
    for what, words in (("memory", "memory"), ("step", "the step's time")):
        pairs = _pairs(record, what)
        if len(pairs) < _FEWEST:
            continue

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
