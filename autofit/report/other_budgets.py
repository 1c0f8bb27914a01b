"""What more or less would run: the next sizes of cards, or half and twice the budget, a little more; other numbers of
devices."""

from autofit.core.errors import pluralize
from autofit.core.pareto import OtherBudget, Point, fastest_within
from autofit.core.result import Result
from autofit.report.formatting import describe, gib, instead, listed, rate, source, speed
from autofit.report.rows import latest_by_config, relative_speed

_MOST_CHANGES = 3  # listed one by one; beyond that the whole config reads easier
_FASTER = 1.01  # predictions are not good enough for a smaller gain


def other_budget_lines(result: Result) -> list[str]:
    """A line for each budget something is known of, tier by tier. Speeds are those of the device measured on."""
    tiers = [name for name, points in result.frontier.items() if points]
    sizes: dict[str, list[str]] = {}
    for other in result.other_budgets:
        by_text: dict[str, list[str]] = {}
        for name in tiers:
            by_text.setdefault(_of_tier(name, other, result), []).append(name)
        card = f", such as {other.card}" if other.card else ""
        for text, names in by_text.items():
            if text:
                line = f": {text}" if names == tiers else f", {listed(names)}: {text}"
                sizes.setdefault(line, []).append(
                    f"{gib(other.device_bytes)} GiB ({other.why}{card})"
                )
    return [f"{listed(budgets)}{line}" for line, budgets in sizes.items()]


def on_other_devices(result: Result) -> str:
    """A list of what was predicted of the answer's config on other numbers of devices, against its own; "" without."""
    by_count = {each.devices: each for each in result.on_devices}
    own = by_count.pop(result.hardware.devices, None)
    usable = result.budget.cap_bytes(result.hardware.device)
    lines = ["The same config on other numbers of devices, by prediction:"] if by_count else []
    for count, each in by_count.items():
        many = pluralize(count, "device") + (" of each node" if result.hardware.nodes > 1 else "")
        speed = (
            f"{each.rate / own.rate:.3g} times the speed, "
            if own and own.rate and each.rate
            else ""
        )
        too_much = "" if each.high <= usable else ", which may not fit"
        lines.append(f"  - {many}: {speed}at most {gib(each.high)} GiB of each{too_much}")
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
    point, leader = result.fastest_within(other.device_bytes)[name], result.tiers.get(name)
    if other.device_bytes > result.budget.device_bytes:
        if point is None or not result.predicted:
            return ""
        usable = result.budget.cap_bytes(result.hardware.device)
        now = fastest_within(result.frontier[name], usable)
        if leader is None:  # nothing of the tier was measured to fit
            return (
                ""
                if now
                else f"{rate(point)} with {describe(point.config)} {source(point.measured)}"
            )
        ratio, different = _against(point, name, result)
        gains = ratio > _FASTER and (
            now is None or point.samples_per_second > now.samples_per_second * _FASTER
        )
        return f"{speed(ratio)} with {different}" if gains else "no gain is expected"
    if leader is None:
        return ""
    if point is None:
        return "nothing is expected to fit" if result.predicted else ""
    if point.config == leader.config:
        return "what is the best here fits there, too"
    ratio, different = _against(point, name, result)
    # Faster ones are among those that tied with the best, and learn less faithfully.
    return f"{speed(ratio) if ratio < 1 else 'no slower'} with {different}"


def _against(point: Point, name: str, result: Result) -> tuple[float, str]:
    """The speed against the best of a tier, which may only have been explored, and what the config has instead."""
    leader = result.tiers[name]
    assert result.best and leader, "where a tier has a best, there is one"
    measurement = latest_by_config(result).get(point.config) if point.measured else None
    if measurement:  # as the table has it
        ratio = relative_speed(measurement, result) / relative_speed(leader, result)
    else:
        ratio = point.samples_per_second / (result.best.throughput * relative_speed(leader, result))
    return ratio, f"{instead(point.config, leader, most=_MOST_CHANGES)} {source(point.measured)}"
