"""Throughput against memory: every measured config, what ran out of memory beyond the budget, and the Pareto fronts.
The other charts draw the same configs with the same marks."""

from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Point, frontier
from autofit.core.record import Predicted, Record
from autofit.core.result import TIERS, Result, tier
from autofit.report.formatting import OUTCOMES, TIER_TITLES, describe, gib, number, peak_bytes
from autofit.report.html.svg import At, Picture, Scale, steps, width_of
from autofit.report.rows import drawn_trials, latest_by_config, relative_speed

_BEYOND = 1.7  # times the budget: as far as the picture goes, unless something else is just beyond
_HIGHEST = 1.6  # times the fastest that was measured: predictions above it are not drawn


@dataclass(frozen=True)
class Plotted:
    """A measured config: the number of its first trial, its latest measurement, and where that stands."""

    number: int
    measurement: Measurement
    tier: str
    rate: float | None
    nbytes: int | None
    predicted: Predicted


def plotted(record: Record) -> list[Plotted]:
    """The measured configs that are drawn, by their latest measurements, in the order of the trials."""
    result = record.result
    latest = latest_by_config(result)
    first: dict[Config, int] = {}
    for place in drawn_trials(result):
        first.setdefault(result.trials[place].config, place)

    configs = []
    for config, place in first.items():
        measurement = latest[config]
        rate = leveled(measurement, result) if measurement.fits else None
        predicted = record.predicted[place] if record.predicted else Predicted()
        number_of_trial = result.trials[place].number
        configs.append(
            Plotted(
                number_of_trial, measurement, tier(config), rate, peak_bytes(measurement), predicted
            )
        )
    return configs


def leveled(measurement: Measurement, result: Result) -> float:
    """Throughput in the result's unit; of what was only explored, relative to the best as it was when explored."""
    if result.best is None:
        return measurement.throughput * per_sample(result)
    return relative_speed(measurement, result) * result.best.throughput * per_sample(result)


def per_sample(result: Result) -> float:
    """Units of throughput in a sample: its tokens where tokens are counted."""
    return result.units_per_sample


def unit(result: Result) -> str:
    """What throughput counts."""
    return result.unit


def hover_text(one: Plotted, result: Result) -> str:
    """A measured config in one line."""
    fits = one.measurement.fits
    figures = [
        f"{number(one.rate)} {unit(result)}/s" if one.rate else OUTCOMES[one.measurement.outcome]
    ]
    if one.nbytes:
        figures.append(f"{'' if fits else 'had taken '}{gib(one.nbytes)} GiB")
    return " \u2014 ".join(
        [f"probe {one.number + 1}: {describe(one.measurement.config)}", *figures]
    )


def link(picture: Picture, number_of_trial: int, title: str, kind: str) -> Element:
    """A link to the row of a trial, for what is drawn into it."""
    element = picture.draw("a", href=f"#trial-{number_of_trial}", kind=kind, tabindex=-1)
    picture.draw("title", title, into=element)
    return element


def shape(picture: Picture, into: Element, name: str, at: At, radius: float) -> None:
    """Draw the mark of a tier: a circle, a triangle, a diamond or a square."""
    x, y = at
    if name == "full":
        picture.draw("circle", into=into, cx=x, cy=y, r=radius)
    elif name == "lora":
        wide, high = radius * 1.15, radius * 1.2
        picture.draw(
            "path",
            into=into,
            d=f"M{x:.1f},{y - high:.1f}l{wide:.1f},{2 * high - 1:.1f}h{-2 * wide:.1f}z",
        )
    elif name == "head":
        reach = radius * 1.2
        d = f"M{x:.1f},{y - reach:.1f}L{x + reach:.1f},{y:.1f}L{x:.1f},{y + reach:.1f}L{x - reach:.1f},{y:.1f}z"
        picture.draw("path", into=into, d=d)
    else:
        picture.draw(
            "rect",
            into=into,
            x=x - radius * 0.9,
            y=y - radius * 0.9,
            width=radius * 1.8,
            height=radius * 1.8,
        )


@dataclass(frozen=True)
class _Plot:
    """The picture and its axes: GiB and units of throughput."""

    picture: Picture
    record: Record
    across: Scale
    up: Scale
    usable: int

    def at(self, nbytes: float, rate: float) -> At:
        return self.across(nbytes / GIB), self.up(rate)


def scatter(record: Record, width: int = 720) -> Picture | None:
    """The picture; None where nothing was measured to fit."""
    result, configs = record.result, plotted(record)
    fitting = [one for one in configs if one.rate and one.nbytes]
    if not fitting:
        return None
    height = 400 if width > 500 else 330
    measured = len({trial.config for trial in result.trials})
    count = str(measured) if len(configs) == measured else f"{len(configs)} of {measured}"
    picture = Picture(
        width,
        height,
        f"Throughput against memory of {count} measured configs",
        interactive=True,
    )
    usable = result.budget.cap_bytes(result.hardware.device)
    plot = _Plot(
        picture,
        record,
        _across(configs, result, usable, width),
        _up(fitting, result, usable, height),
        usable,
    )
    picture.frame(
        plot.across,
        plot.up,
        titles=("peak memory, GiB", f"{unit(result)}/s"),
        ticks=(width // 90, 5),
    )
    _budget_line(plot)
    scale = per_sample(result)
    seen = ((one.measurement.config, one.nbytes or 0, (one.rate or 0.0) / scale) for one in fitting)
    points = [Point(*each, None, measured=True) for each in seen]
    points += [
        point for of_tier in result.frontier.values() for point in of_tier if not point.measured
    ]
    for name in TIERS:
        _front(plot, [point for point in points if tier(point.config) == name], name)
    for one in configs:
        if not one.rate and one.measurement.outcome is Outcome.OUT_OF_MEMORY:
            _miss(plot, one)
    for one in fitting:
        leads = result.best is not None and result.best.config == one.measurement.config
        element = link(
            picture,
            one.number,
            hover_text(one, result),
            f"dot {one.tier}{' best' if leads else ''}",
        )
        shape(
            picture,
            element,
            one.tier,
            plot.at(one.nbytes or 0, one.rate or 0),
            radius=6.5 if leads else 4.5,
        )
    _label_leaders(plot, fitting)
    return picture


def _across(configs: list[Plotted], result: Result, usable: int, width: int) -> Scale:
    most = max([usable * 1.12, *(one.nbytes for one in configs if one.nbytes and one.rate)])
    beyond: list[float] = [
        point.peak_bytes for points in result.frontier.values() for point in points
    ]
    beyond += [
        _needed(one, usable) for one in configs if one.measurement.outcome is Outcome.OUT_OF_MEMORY
    ]
    further = [size for size in beyond if most < size <= usable * _BEYOND]
    clipped = usable * _BEYOND if any(size > usable * _BEYOND for size in beyond) else most
    return Scale(0.0, max([most, clipped, *further]) / GIB, 52, width - 14)


def _up(fitting: list[Plotted], result: Result, usable: int, height: int) -> Scale:
    rates = [one.rate for one in fitting if one.rate]
    most = _HIGHEST * max(rates)
    points = (
        point
        for of_tier in result.frontier.values()
        for point in of_tier
        if point.peak_bytes < usable * _BEYOND
    )
    rates += [
        rate for point in points if (rate := point.samples_per_second * per_sample(result)) < most
    ]
    low = 0.0 if min(rates) < 0.6 * max(rates) else min(rates) * 0.9
    return Scale(low, max(rates) * 1.08, height - 44, 30)


def _budget_line(plot: _Plot) -> None:
    x, top, bottom = plot.across(plot.usable / GIB), plot.up.end - 6, plot.up.start
    plot.picture.draw(
        "rect", x=x, y=top, width=plot.across.end - x, height=bottom - top, kind="beyond"
    )
    plot.picture.line((x, bottom), (x, top), "budget")
    budget = plot.record.result.budget.device_bytes
    words = (
        f"{gib(plot.usable)} usable of {gib(budget)} GiB"
        if plot.usable < budget
        else f"budget {gib(budget)} GiB"
    )
    plot.picture.text(x - 5, top - 4, words, kind="budget-label", anchor="end")


def _front(plot: _Plot, points: list[Point], name: str) -> None:
    """Draw a stair through the best of each amount of memory; dashed where it leads to predictions."""
    scale = per_sample(plot.record.result)
    front = frontier(points, tolerance=plot.record.tolerance)
    drawn = [
        (plot.at(point.peak_bytes, point.samples_per_second * scale), point) for point in front
    ]
    drawn = [
        (at, point) for at, point in drawn if at[0] <= plot.across.end and at[1] >= plot.up.end - 14
    ]
    group = plot.picture.draw("g", kind=f"frontier {name}")
    for (start, _), (end, point) in pairwise(drawn):
        plot.picture.draw(
            "path", into=group, d=steps([start, end]), kind="known" if point.measured else "guessed"
        )
    for at, point in drawn:
        if not point.measured:
            rate = f"{number(point.samples_per_second * scale)} {unit(plot.record.result)}/s"
            title = f"predicted: {describe(point.config)} \u2014 {rate} \u2014 {gib(point.peak_bytes)} GiB"
            mark = plot.picture.draw("g", into=group, kind="guess")
            plot.picture.draw("title", title, into=mark)
            shape(plot.picture, mark, name, at, radius=3.2)


def _miss(plot: _Plot, one: Plotted) -> None:
    """Draw a cross beyond the budget: where it is predicted to be, or at the bottom where nothing is."""
    result, bottom = plot.record.result, plot.up.start - 9
    x, y = min(plot.across(_needed(one, plot.usable) / GIB), plot.across.end - 6), bottom
    if one.predicted.step_seconds:
        rate = (
            (result.workload.get("effective_batch_size") or 1)
            / one.predicted.step_seconds
            * per_sample(result)
        )
        y = min(max(plot.up(rate), plot.up.end), bottom)
    element = link(plot.picture, one.number, hover_text(one, result), f"dot missed {one.tier}")
    plot.picture.draw("rect", into=element, x=x - 7, y=y - 7, width=14, height=14, kind="reach")
    plot.picture.cross((x, y), 3.6, element)


def _needed(one: Plotted, usable: int) -> float:
    """What a config that ran out of memory needs: more than it had taken, and more than there is."""
    return max(one.nbytes or 0, one.predicted.allocated_bytes or 0, usable * 1.03)


def _label_leaders(plot: _Plot, fitting: list[Plotted]) -> None:
    """Write the name of a tier beside its best."""
    best, taken = plot.record.result.best, list[float]()
    for name, leader in plot.record.result.tiers.items():
        one = next(
            (one for one in fitting if leader and one.measurement.config == leader.config), None
        )
        if one is None or not one.nbytes or not one.rate:
            continue
        x, y = plot.at(one.nbytes, one.rate)
        leads = best is not None and best.config == one.measurement.config
        words = f"{'best: ' if leads else 'best of '}{TIER_TITLES[name]}, {number(one.rate)}"
        y -= 11
        while any(abs(y - other) < 13 for other in taken):
            y -= 13
        taken.append(y)
        # Beside the budget line there is more room to the left.
        right = x + width_of(words) < plot.across.end
        plot.picture.text(
            x if right else x + 6, y, words, kind=f"name {name}", anchor="start" if right else "end"
        )
