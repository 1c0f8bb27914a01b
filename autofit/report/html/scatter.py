"""Throughput against memory: every measured config, what ran out of memory beyond the budget, and the frontiers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

from autofit.core.hardware import GIB
from autofit.core.pareto import Point, frontier
from autofit.core.record import Record
from autofit.core.result import TIERS, Result, tier
from autofit.report.formatting import describe, gib, number
from autofit.report.html.plot_data import TITLES, Plotted, measured_points, per_sample, plotted, told, unit
from autofit.report.html.svg import Picture, Scale, steps, width_of

_BEYOND = 1.7  # times the budget: as far as the picture goes, unless something else is just beyond
_HIGHEST = 1.6  # times the fastest that was measured: predictions above it are not drawn
_RADIUS = 4.5


@dataclass(frozen=True)
class _Plot:
    """What is drawn on."""

    picture: Picture
    record: Record
    across: Scale
    up: Scale

    @property
    def result(self) -> Result:
        return self.record.result

    def place(self, nbytes: float, rate: float) -> tuple[float, float]:
        return self.across(nbytes / GIB), self.up(rate)


def scatter(record: Record, width: int = 720) -> Picture | None:
    """The picture; None where nothing was measured to fit."""
    result = record.result
    each = plotted(record)
    fitting = [one for one in each if one.rate and one.nbytes]
    if not fitting:
        return None
    height = 400 if width > 500 else 330
    picture = Picture(width, height, f"Throughput against memory of {len(each)} measured configs", interactive=True)
    plot = _Plot(picture, record, _across(each, result, width), _up(fitting, result, height))
    picture.frame(plot.across, plot.up, titles=("peak memory, GiB", f"{unit(result)}/s"), ticks=(width // 90, 5))
    _budget_line(plot)
    points = [
        *measured_points(each, result),
        *(p for of_one in result.frontier.values() for p in of_one if not p.measured),
    ]
    for name in TIERS:
        _frontier(plot, [point for point in points if tier(point.config) == name], name)
    for one in each:
        if not one.rate and one.ran_out:
            _missed(plot, one)
    for one in fitting:
        _dot(plot, one)
    _label_leaders(plot, fitting)
    return picture


def _usable(result: Result) -> float:
    return result.budget.cap_bytes(result.hardware.device)


def _across(each: list[Plotted], result: Result, width: int) -> Scale:
    budget = _usable(result)
    most = max([budget * 1.12, *(one.nbytes for one in each if one.nbytes and one.rate)])
    beyond: list[float] = [p.peak_bytes for points in result.frontier.values() for p in points]
    beyond += [_needed(one, result) for one in each if one.ran_out]
    further = [size for size in beyond if most < size <= budget * _BEYOND]
    clipped = budget * _BEYOND if any(size > budget * _BEYOND for size in beyond) else most
    return Scale(0.0, max([most, clipped, *further]) / GIB, 52, width - 14)


def _up(fitting: list[Plotted], result: Result, height: int) -> Scale:
    rates = [one.rate for one in fitting if one.rate]
    guessed = (p for points in result.frontier.values() for p in points if p.peak_bytes < _usable(result) * _BEYOND)
    most = _HIGHEST * max(rates)
    rates += [rate for p in guessed if (rate := p.samples_per_second * per_sample(result)) < most]
    low = 0.0 if min(rates) < 0.6 * max(rates) else min(rates) * 0.9
    return Scale(low, max(rates) * 1.08, height - 44, 30)


def _budget_line(plot: _Plot) -> None:
    at, picture = plot.across(_usable(plot.result) / GIB), plot.picture
    picture.draw(
        "rect",
        x=at,
        y=plot.up.end - 6,
        width=plot.across.end - at,
        height=plot.up.start - plot.up.end + 6,
        kind="beyond",
    )
    picture.line((at, plot.up.start), (at, plot.up.end - 6), "budget")
    budget = plot.result.budget.device_bytes
    words = f"budget {gib(budget)} GiB"
    if _usable(plot.result) < budget:
        words = f"{gib(int(_usable(plot.result)))} usable of {gib(budget)} GiB"
    picture.text(at - 5, plot.up.end - 10, words, kind="budget-label", anchor="end")


def _frontier(plot: _Plot, points: list[Point], name: str) -> None:
    """A stair through the best of each amount of memory; dashed where it leads to what is only predicted."""
    best = frontier(points, tolerance=plot.record.tolerance)
    scale = per_sample(plot.result)
    places = [plot.place(each.peak_bytes, each.samples_per_second * scale) for each in best]
    inside = [
        (at, each)
        for at, each in zip(places, best, strict=True)
        if at[0] <= plot.across.end and at[1] >= plot.up.end - 14
    ]
    group = plot.picture.draw("g", kind=f"frontier {name}")
    for (start, _), (end, point) in pairwise(inside):
        plot.picture.draw("path", into=group, d=steps([start, end]), kind="known" if point.measured else "guessed")
    for at, point in inside:
        if not point.measured:
            rate = f"{number(point.samples_per_second * scale)} {unit(plot.result)}/s"
            words = f"predicted: {describe(point.config)} \u2014 {rate}"
            mark = plot.picture.draw("g", into=group, kind="guess")
            plot.picture.draw("title", f"{words} \u2014 {gib(point.peak_bytes)} GiB", into=mark)
            shape(plot.picture, mark, name, at, radius=3.2)


def _dot(plot: _Plot, one: Plotted) -> None:
    assert one.nbytes and one.rate, "only what fits is a dot"
    best = plot.result.best
    leads = best is not None and best.config == one.measurement.config
    link = _link(plot, one, f"dot {one.tier}{' best' if leads else ''}")
    shape(plot.picture, link, one.tier, plot.place(one.nbytes, one.rate), radius=6.5 if leads else _RADIUS)


def _missed(plot: _Plot, one: Plotted) -> None:
    """A cross beyond the budget: where it is predicted to be, or at the bottom where nothing is."""
    x = min(plot.across(_needed(one, plot.result) / GIB), plot.across.end - 6)
    y = plot.up.start - 9
    seconds = one.predicted.step_seconds
    if seconds:
        batch = plot.result.workload.get("effective_batch_size") or 1
        y = min(max(plot.up(batch / seconds * per_sample(plot.result)), plot.up.end), plot.up.start - 9)
    link = _link(plot, one, f"dot missed {one.tier}")
    radius = 3.6
    plot.picture.draw("rect", into=link, x=x - 7, y=y - 7, width=14, height=14, kind="reach")
    path = f"M{x - radius:.1f},{y - radius:.1f}l{2 * radius},{2 * radius}m0,{-2 * radius}l{-2 * radius},{2 * radius}"
    plot.picture.draw("path", into=link, d=path)


def _needed(one: Plotted, result: Result) -> float:
    """What a config that ran out of memory needs: more than it had taken, and more than there is."""
    return max(one.nbytes or 0, one.predicted.allocated_bytes or 0, _usable(result) * 1.03)


def _link(plot: _Plot, one: Plotted, kind: str) -> ElementTree.Element:
    link = plot.picture.draw("a", href=f"#trial-{one.number}", kind=kind, tabindex=-1)
    plot.picture.draw("title", told(one, plot.result), into=link)
    return link


def shape(picture: Picture, into: ElementTree.Element, name: str, at: tuple[float, float], radius: float) -> None:
    """The mark of a tier: a circle, a triangle or a square."""
    x, y = at
    if name == "full":
        picture.draw("circle", into=into, cx=x, cy=y, r=radius)
    elif name == "lora":
        wide, high = radius * 1.15, radius * 1.2
        picture.draw("path", into=into, d=f"M{x:.1f},{y - high:.1f}l{wide:.1f},{2 * high - 1:.1f}h{-2 * wide:.1f}z")
    else:
        picture.draw("rect", into=into, x=x - radius * 0.9, y=y - radius * 0.9, width=radius * 1.8, height=radius * 1.8)


def _label_leaders(plot: _Plot, fitting: list[Plotted]) -> None:
    """The name of a tier beside its best."""
    taken: list[float] = []
    for name, leader in plot.result.tiers.items():
        one = next((each for each in fitting if leader and each.measurement.config == leader.config), None)
        if one is None or not one.nbytes or not one.rate:
            continue
        x, y = plot.place(one.nbytes, one.rate)
        leads = plot.result.best is not None and leader is not None and leader.config == plot.result.best.config
        words = f"{'best: ' if leads else 'best of '}{TITLES[name]}, {number(one.rate)}"
        y -= 11
        while any(abs(y - other) < 13 for other in taken):
            y -= 13
        taken.append(y)
        # Beside the budget line there is more room to the left.
        right = x + width_of(words) < plot.across.end
        plot.picture.text(x if right else x + 6, y, words, kind=f"name {name}", anchor="start" if right else "end")
