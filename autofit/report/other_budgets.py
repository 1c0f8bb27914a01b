"""What more or less would run: the next sizes of cards, or half and twice the budget, a little
more; other numbers of devices."""

from autofit.core.errors import pluralize
from autofit.core.measurement import Measurement
from autofit.core.pareto import OtherBudget, Point, fastest_within
from autofit.core.result import Result
from autofit.report.formatting import POINT, describe, gib, instead, listed, rate, source, speed
from autofit.report.rows import relative_speed

_MOST_CHANGES = 3  # listed one by one; beyond that the whole config reads easier
_FASTER = 1.01  # predictions are not good enough for a smaller gain


def other_budget_lines(result: Result) -> list[str]:
    """A line for each budget something is known of, tier by tier.

    Speeds are those of the device measured on.
    """
    tiers = [name for name, points in result.frontier.items() if points]
    budgets_by_line: dict[str, list[str]] = {}
    for other in result.other_budgets:
        why = other.why
        if other.card:
            why += f", such as {other.card}"
        budget = f"{gib(other.device_bytes)} GiB ({why})"

        names_by_text: dict[str, list[str]] = {}
        for name in tiers:
            text = _of_tier(name, other, result)
            if text:
                names_by_text.setdefault(text, []).append(name)

        for text, names in names_by_text.items():
            line = f": {text}"
            if names != tiers:
                line = f", {listed(names)}: {text}"
            budgets_by_line.setdefault(line, []).append(budget)

    return [f"{listed(budgets)}{line}" for line, budgets in budgets_by_line.items()]


def on_other_devices(result: Result) -> str:
    """A list of what was predicted of the answer's config on other numbers of devices, against its
    own; empty where nothing was."""
    hardware = result.hardware
    by_count = {prediction.devices: prediction for prediction in result.on_devices}
    own = by_count.pop(hardware.devices, None)
    if not by_count:
        return ""

    own_rate = 0.0
    if own and own.rate:
        own_rate = own.rate
    usable = result.budget.cap_bytes(hardware.device)

    lines = ["The same config on other numbers of devices, by prediction:"]
    for count, prediction in by_count.items():
        place = pluralize(count, "device")
        if hardware.nodes > 1:
            place += " of each node"

        figures = f"at most {gib(prediction.high)} GiB of each"
        if prediction.rate and own_rate:
            figures = f"{prediction.rate / own_rate:.3g} times the speed, {figures}"
        if prediction.high > usable:
            figures += ", which may not fit"
        lines.append(f"{POINT}{place}: {figures}")

    return "\n".join(lines)


def least_that_fits(result: Result) -> tuple[int, Point] | None:
    """The smallest budget in which anything was measured, or is expected, to fit; and what."""
    first = [points[0] for points in result.frontier.values() if points]
    if not first:
        return None

    least = min(first, key=lambda point: point.peak_bytes)
    return result.budget.bytes_for(least.peak_bytes, result.hardware.device), least


def _of_tier(name: str, other: OtherBudget, result: Result) -> str:
    """What a budget would bring a tier; empty where nothing is known of it."""
    point = result.fastest_within(other.device_bytes)[name]
    if other.device_bytes > result.budget.device_bytes:
        if point is None or not result.predicted:
            return ""
        return _with_more(name, point, result)

    leader = result.tiers.get(name)
    if leader is None:
        return ""

    if point is None:
        if not result.predicted:
            return ""
        return "nothing is expected to fit"

    if point.config == leader.config:
        return "what is the best here fits there, too"

    ratio, different = _against(point, leader, result)
    if ratio >= 1:
        # Faster ones are among those that tied with the best, and learn less faithfully.
        return f"no slower with {different}"

    return f"{speed(ratio)} with {different}"


def _with_more(name: str, point: Point, result: Result) -> str:
    """What the fastest config of a larger budget would bring a tier."""
    usable = result.budget.cap_bytes(result.hardware.device)
    now = fastest_within(result.frontier[name], usable)
    leader = result.tiers.get(name)
    if leader is None:  # nothing of the tier was measured to fit
        if now:
            return ""
        return f"{rate(point)} with {describe(point.config)} {source(point.measured)}"

    ratio, different = _against(point, leader, result)
    is_faster = True
    if now is not None:
        is_faster = point.samples_per_second > now.samples_per_second * _FASTER
    if ratio > _FASTER and is_faster:
        return f"{speed(ratio)} with {different}"

    return "no gain is expected"


def _against(point: Point, leader: Measurement, result: Result) -> tuple[float, str]:
    """The speed against the best of a tier, which may only have been explored, and what the config
    has instead."""
    assert result.best, "where a tier has a best, there is one"
    own = relative_speed(leader, result)
    ratio = point.samples_per_second / (result.best.throughput * own)
    if point.measured:
        measurement = result.latest_by_config.get(point.config)
        if measurement:  # as the table has it
            ratio = relative_speed(measurement, result) / own

    different = instead(point.config, leader, most=_MOST_CHANGES)
    return ratio, f"{different} {source(point.measured)}"
