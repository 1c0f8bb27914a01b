"""Throughput against memory: every measured config, what ran out of memory beyond the budget, and
the Pareto fronts.

The other charts draw the same configs with the same marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Point, frontier
from autofit.core.record import Predicted, Record
from autofit.core.result import TIERS, Result, of_tier, tier
from autofit.report.formatting import OUTCOMES, TIER_TITLES, describe, gib, number, peak_bytes
from autofit.report.html.svg import At, Picture, Plot, Scale, polyline, steps, width_of
from autofit.report.rows import drawn_trials, relative_speed

_BEYOND = 1.7  # times the budget: as far as the picture goes, unless something else is just beyond
_HIGHEST = 1.6  # times the fastest that was measured: predictions above it are not drawn
_LINE = 13  # pixels from one label to the next


@dataclass(frozen=True)
class Plotted:
    """A measured config.

    Attributes:
        number: of its first trial.
        measurement: its latest one.
        rate: where that stands, in units of throughput; None where it does not fit.
        nbytes: its peak; None where that was not watched.
    """

    number: int
    measurement: Measurement
    tier: str
    rate: float | None
    nbytes: int | None
    predicted: Predicted

    @property
    def ran_out(self) -> bool:
        """Whether it needed more memory than there was."""
        return self.measurement.outcome is Outcome.OUT_OF_MEMORY


def plotted(record: Record) -> list[Plotted]:
    """The measured configs that are drawn, by their latest measurements, in the order of the
    trials."""
    result = record.result
    first: dict[Config, int] = {}
    for place in drawn_trials(result):
        first.setdefault(result.trials[place].config, place)

    configs = []
    for config, place in first.items():
        measurement = result.latest_by_config[config]
        rate = leveled(measurement, result) if measurement.fits else None
        predicted = record.predicted[place] if record.predicted else Predicted()
        configs.append(
            Plotted(
                number=result.trials[place].number,
                measurement=measurement,
                tier=tier(config),
                rate=rate,
                nbytes=peak_bytes(measurement),
                predicted=predicted,
            )
        )

    return configs


def leveled(measurement: Measurement, result: Result) -> float:
    """Throughput in the result's unit; of what was only explored, relative to the best as it was
    when explored."""
    throughput = measurement.throughput
    if result.best is not None:
        throughput = relative_speed(measurement, result) * result.best.throughput

    return throughput * result.units_per_sample


def hover_text(dot: Plotted, result: Result) -> str:
    """A measured config in one line."""
    measurement = dot.measurement
    probe = f"probe {dot.number + 1}: {describe(measurement.config)}"
    figure = OUTCOMES[measurement.outcome]
    if dot.rate:
        figure = f"{number(dot.rate)} {result.unit}/s"

    parts = [probe, figure]
    if dot.nbytes:
        size = f"{gib(dot.nbytes)} GiB"
        if not measurement.fits:
            size = f"had taken {size}"
        parts.append(size)

    return " \u2014 ".join(parts)


def link(
    picture: Picture,
    number_of_trial: int,
    title: str,
    kind: str,
) -> Element:
    """A link to the row of a trial, for what is drawn into it."""
    return picture.titled(
        "a",
        title,
        href=f"#trial-{number_of_trial}",
        kind=kind,
        tabindex=-1,
    )


def shape(
    picture: Picture,
    into: Element,
    name: str,
    at: At,
    radius: float,
) -> None:
    """Draw the mark of a tier: a circle, a triangle, a diamond or a square."""
    x, y = at
    if name == "full":
        picture.circle(at, radius, into=into)
    elif name == "lora":
        wide = radius * 1.15
        high = radius * 1.2
        tip = f"M{x:.1f},{y - high:.1f}"
        sides = f"l{wide:.1f},{2 * high - 1:.1f}h{-2 * wide:.1f}z"
        picture.path(tip + sides, into=into)
    elif name == "head":
        reach = radius * 1.2
        corners = [
            (x, y - reach),
            (x + reach, y),
            (x, y + reach),
            (x - reach, y),
        ]
        picture.path(f"{polyline(corners)}z", into=into)
    else:
        half = radius * 0.9
        side = 2 * half
        picture.draw(
            "rect",
            into=into,
            x=x - half,
            y=y - half,
            width=side,
            height=side,
        )


def scatter(record: Record, width: int = 720) -> Picture | None:
    """The picture; None where nothing was measured to fit."""
    result = record.result
    dots = plotted(record)
    fitting = [dot for dot in dots if dot.rate and dot.nbytes]
    if not fitting:
        return None

    measured = len({trial.config for trial in result.trials})
    count = str(measured)
    if len(dots) < measured:
        count = f"{len(dots)} of {measured}"

    height = 330
    if width > 500:
        height = 400
    usable = result.budget.cap_bytes(result.hardware.device)
    plot = Plot(
        (width, height),
        f"Throughput against memory of {count} measured configs",
        across=_across(dots, result, usable, width),
        up=_up(fitting, result, usable, height),
        interactive=True,
    )
    plot.frame(("peak memory, GiB", f"{result.unit}/s"), ticks=(width // 90, 5))
    _budget_line(plot, usable, result.budget.device_bytes)
    _fronts(plot, fitting, record)

    for dot in dots:
        if dot.ran_out and not dot.rate:
            _miss(plot, dot, usable, result)

    for dot in fitting:
        kind = f"dot {dot.tier}"
        radius = 4.5
        if result.best is not None and result.best.config == dot.measurement.config:
            kind += " best"
            radius = 6.5

        element = link(plot, dot.number, hover_text(dot, result), kind)
        shape(plot, element, dot.tier, _place(plot, dot), radius)

    _label_leaders(plot, fitting, result)
    return plot


def _place(plot: Plot, dot: Plotted) -> At:
    """Where a config stands whose memory and throughput are known."""
    assert dot.nbytes and dot.rate, "it fits"
    return plot.at(dot.nbytes / GIB, dot.rate)


def _across(
    dots: list[Plotted],
    result: Result,
    usable: int,
    width: int,
) -> Scale:
    """The axis of memory, as far as the largest that fits, and what is just beyond."""
    furthest = usable * _BEYOND
    most = usable * 1.12
    beyond: list[float] = []
    for dot in dots:
        if dot.nbytes and dot.rate:
            most = max(most, dot.nbytes)
        if dot.ran_out:
            beyond.append(_needed(dot, usable))

    for points in result.frontier.values():
        beyond += [point.peak_bytes for point in points]

    end = most
    for size in beyond:
        end = max(end, min(size, furthest))
    return Scale(0.0, end / GIB, 52, width - 14)


def _up(
    fitting: list[Plotted],
    result: Result,
    usable: int,
    height: int,
) -> Scale:
    """The axis of throughput, as high as what was measured, and predictions not far above."""
    rates = [dot.rate for dot in fitting if dot.rate]
    most = _HIGHEST * max(rates)
    for points in result.frontier.values():
        for point in points:
            rate = point.samples_per_second * result.units_per_sample
            if point.peak_bytes < usable * _BEYOND and rate < most:
                rates.append(rate)

    low = 0.0
    if min(rates) >= 0.6 * max(rates):
        low = min(rates) * 0.9
    return Scale(low, max(rates) * 1.08, height - 44, 30)


def _budget_line(plot: Plot, usable: int, budget: int) -> None:
    """Draw what may be used of the budget as a line, and shade what is beyond."""
    x = plot.across(usable / GIB)
    top = plot.up.end - 6
    bottom = plot.up.start
    plot.draw(
        "rect",
        x=x,
        y=top,
        width=plot.across.end - x,
        height=bottom - top,
        kind="beyond",
    )
    plot.line((x, bottom), (x, top), "budget")

    words = f"budget {gib(budget)} GiB"
    if usable < budget:
        words = f"{gib(usable)} usable of {gib(budget)} GiB"
    plot.text(x - 5, top - 4, words, kind="budget-label", anchor="end")


def _fronts(plot: Plot, fitting: list[Plotted], record: Record) -> None:
    """Draw the front of each tier, through what was measured and what is predicted."""
    result = record.result
    points = []
    for dot in fitting:
        assert dot.nbytes and dot.rate, "it fits"
        point = Point(
            dot.measurement.config,
            peak_bytes=dot.nbytes,
            samples_per_second=dot.rate / result.units_per_sample,
            tokens_per_second=None,
            measured=True,
        )
        points.append(point)

    for predicted in result.frontier.values():
        points += [point for point in predicted if not point.measured]

    for name in TIERS:
        front = frontier(of_tier(name, points), tolerance=record.tolerance)
        _front(plot, name, front, result)


def _front(
    plot: Plot,
    name: str,
    front: Sequence[Point],
    result: Result,
) -> None:
    """Draw a stair through the best of each amount of memory.

    It is dashed where it leads to predictions, which have marks of their own.
    """
    highest = plot.up.end - 14
    drawn = []
    for point in front:
        rate = point.samples_per_second * result.units_per_sample
        x, y = plot.at(point.peak_bytes / GIB, rate)
        if x <= plot.across.end and y >= highest:
            drawn.append(((x, y), rate, point))

    group = plot.draw("g", kind=f"frontier {name}")
    for (start, *_), (end, _, point) in pairwise(drawn):
        kind = "guessed"
        if point.measured:
            kind = "known"
        plot.path(steps([start, end]), kind, group)

    for at, rate, point in drawn:
        if point.measured:
            continue

        figures = f"{number(rate)} {result.unit}/s \u2014 {gib(point.peak_bytes)} GiB"
        title = f"predicted: {describe(point.config)} \u2014 {figures}"
        mark = plot.titled("g", title, into=group, kind="guess")
        shape(plot, mark, name, at, radius=3.2)


def _miss(
    plot: Plot,
    dot: Plotted,
    usable: int,
    result: Result,
) -> None:
    """Draw a cross beyond the budget: where it is predicted to be, or at the bottom where nothing
    is."""
    needed = plot.across(_needed(dot, usable) / GIB)
    x = min(needed, plot.across.end - 6)

    bottom = plot.up.start - 9
    y = bottom
    seconds = dot.predicted.step_seconds
    if seconds:
        samples = result.workload.get("effective_batch_size") or 1
        rate = samples / seconds * result.units_per_sample
        y = min(max(plot.up(rate), plot.up.end), bottom)

    words = hover_text(dot, result)
    element = link(plot, dot.number, words, f"dot missed {dot.tier}")
    plot.draw(
        "rect",
        into=element,
        x=x - 7,
        y=y - 7,
        width=14,
        height=14,
        kind="reach",
    )
    plot.cross((x, y), 3.6, element)


def _needed(dot: Plotted, usable: int) -> float:
    """The bytes that a config needs which ran out of memory: more than it had taken, and more than
    there is."""
    return max(dot.nbytes or 0, dot.predicted.allocated_bytes or 0, usable * 1.03)


def _label_leaders(plot: Plot, fitting: list[Plotted], result: Result) -> None:
    """Write the name of a tier beside its best, above the names that are there already."""
    best = None
    if result.best is not None:
        best = result.best.config

    by_config = {dot.measurement.config: dot for dot in fitting}
    taken: list[float] = []
    for name, leader in result.tiers.items():
        if leader is None or leader.config not in by_config:
            continue

        dot = by_config[leader.config]
        title = f"best of {TIER_TITLES[name]}"
        if leader.config == best:
            title = f"best: {TIER_TITLES[name]}"
        words = f"{title}, {number(dot.rate or 0.0)}"

        x, y = _place(plot, dot)
        y -= 11
        while any(abs(y - other) < _LINE for other in taken):
            y -= _LINE
        taken.append(y)

        anchor = "start"
        if x + width_of(words) >= plot.across.end:
            x += 6  # beside the budget line there is more room to the left
            anchor = "end"
        plot.text(x, y, words, kind=f"name {name}", anchor=anchor)
