"""What more or less memory would run: the next sizes of cards, or half and twice the budget, and a little more."""

from __future__ import annotations

from autofit.core.measurement import Measurement
from autofit.core.pareto import OtherBudget, Point, fastest_within
from autofit.core.result import Result
from autofit.report.formatting import changes, describe, gib, listed, number, source, speed
from autofit.report.rows import latest_by_config, relative_speed

_MOST_CHANGES = 3  # told one by one; beyond that the whole config reads easier
_FASTER = 1.01  # what gains less is no gain: predictions are not that good


def other_budget_lines(result: Result) -> list[str]:
    """A line for what is known of each budget, tier by tier. The speed is that of the device here."""
    known = [name for name, points in result.frontier.items() if points]
    sizes: dict[str, list[str]] = {}
    for other in result.other_budgets:
        told: dict[str, list[str]] = {}
        for name in known:
            told.setdefault(_of_tier(name, other, result), []).append(name)
        for text, tiers in told.items():
            if text:
                line = f": {text}" if tiers == known else f", {listed(tiers)}: {text}"
                sizes.setdefault(line, []).append(_size(other))
    return [f"{listed(each)}{line}" for line, each in sizes.items()]


def least_that_fits(result: Result) -> tuple[int, Point] | None:
    """The smallest budget in which anything was measured, or is expected, to fit; and what."""
    first = [points[0] for points in result.frontier.values() if points]
    if not first:
        return None
    least = min(first, key=lambda point: point.peak_bytes)
    return result.budget.bytes_for(least.peak_bytes, result.hardware.device), least


def _size(other: OtherBudget) -> str:
    card = f", such as {other.card}" if other.card else ""
    return f"{gib(other.device_bytes)} GiB ({other.why}{card})"


def _of_tier(tier: str, other: OtherBudget, result: Result) -> str:
    tell = _larger if other.device_bytes > result.budget.device_bytes else _smaller
    return tell(result.fastest_within(other.device_bytes)[tier], tier, result)


def _larger(point: Point | None, tier: str, result: Result) -> str:
    """What more memory would bring; where nothing was predicted, nothing is known of it."""
    if point is None or not result.predicted:
        return ""
    here, leader = fastest_within(result.frontier[tier], _usable(result)), result.tiers.get(tier)
    if leader is None:  # a tier of which nothing was measured to fit
        return "" if here else f"{_rate(point)} with {describe(point.config)} {source(point.measured)}"
    ratio = _ratio(point, leader, result)
    gains = ratio > _FASTER and (here is None or point.samples_per_second > here.samples_per_second * _FASTER)
    return f"{speed(ratio)} with {_different(point, leader)}" if gains else "no gain is expected"


def _smaller(point: Point | None, tier: str, result: Result) -> str:
    leader = result.tiers.get(tier)
    if leader is None:
        return ""
    if point is None:
        return "nothing is expected to fit" if result.predicted else ""
    if point.config == leader.config:
        return "what is the best here fits there, too"
    ratio = _ratio(point, leader, result)
    # Faster ones are among those that tied with the best, and learn less faithfully.
    return f"{speed(ratio) if ratio < 1 else 'no slower'} with {_different(point, leader)}"


def _usable(result: Result) -> int:
    return result.budget.cap_bytes(result.hardware.device)


def _ratio(point: Point, leader: Measurement, result: Result) -> float:
    """Against the best of its tier, which may only have been explored; of what was measured as the table has it."""
    assert result.best, "where a tier has a best, there is one"
    if point.measured:
        return relative_speed(latest_by_config(result)[point.config], result) / relative_speed(leader, result)
    return point.samples_per_second / (result.best.throughput * relative_speed(leader, result))


def _different(point: Point, leader: Measurement) -> str:
    told = changes(point.config, leader.config)
    different = ", ".join(told) if len(told) <= _MOST_CHANGES else describe(point.config)
    return f"{different} {source(point.measured)}"


def _rate(point: Point) -> str:
    if point.tokens_per_second:
        return f"{number(point.tokens_per_second)} tokens/s"
    return f"{number(point.samples_per_second)} samples/s"
