"""The rows of the result table: every measured config against the best, and why each one lost."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autofit.core.config import Config
from autofit.core.faithfulness import cost_in_faithfulness
from autofit.core.knobs import FIDELITY_ORDER
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import Result, tier
from autofit.report.formatting import peak_bytes, percent, rate, verified, why_not

_NOTICED = 0.05  # of a change between exploring and verifying, worth a line
_MISSES = 2  # configs that did not fit, in the table: enough to see where the budget ends
MOST_DRAWN = 300  # trials on a page: more dots cover each other


@dataclass(frozen=True)
class Row:
    """A measurement and how it compares, in a few words."""

    measurement: Measurement
    verdict: str
    best: bool = False


def table_rows(result: Result, *, tolerance: float, rows: int) -> list[Row]:
    """The best, the best of every other tier, the fastest others, and the nearest of those that did
    not fit."""
    best = result.best
    shown = []
    leaders = []
    leading = set()
    if best is not None:
        words = filter(None, ("best", verified(best)))
        shown.append(Row(best, ", ".join(words), best=True))
        leading.add(best.config)

        for leader in result.tiers.values():
            if leader and leader.config != best.config:
                leaders.append(leader)
                leading.add(leader.config)

    fitting = []
    misses = []
    for config, other in result.latest_by_config.items():
        if config in leading:
            continue
        if other.fits:
            fitting.append(other)
        else:
            misses.append(other)

    misses.sort(key=_nearness)
    misses = misses[: min(_MISSES, max(1, rows // 3))]

    # The runner-up was verified with the best, so it is shown whatever else was fast when explored.
    second = result.runner_up.config if result.runner_up else None
    fitting.sort(key=lambda other: (other.config != second, -other.throughput))

    room = max(1, rows - len(leaders) - len(misses))
    fitted = [*leaders, *fitting[:room]]
    fitted.sort(key=lambda other: -other.throughput)

    shown += [Row(other, _verdict(other, result, tolerance)) for other in fitted]
    shown += [Row(miss, why_not(miss, result.budget)) for miss in misses]
    return shown


def drawn_trials(result: Result) -> list[int]:
    """The places of the trials that a page draws.

    All, or else the leading configs, the fastest trials, and some from each part of the search.
    """
    trials = result.trials
    count = len(trials)
    if count <= MOST_DRAWN:
        return list(range(count))

    leaders = (
        *result.finalists,
        *result.tiers.values(),
        result.runner_up,
        result.best,
    )
    leading = {leader.config for leader in leaders if leader}
    chosen = [place for place, trial in enumerate(trials) if trial.config in leading]

    stride = math.ceil(count / (MOST_DRAWN // 2))
    chosen += range(0, count, stride)
    chosen += sorted(range(count), key=lambda place: -trials[place].throughput)
    without_repeats = list(dict.fromkeys(chosen))

    return sorted(without_repeats[:MOST_DRAWN])


def relative_speed(measurement: Measurement, result: Result) -> float:
    """Throughput against the best, measured the same way: verified runs with verified ones,
    explored with explored."""
    assert result.best, "there is a best to compare with"
    reference = result.best
    if not measurement.verified and result.best_explored:
        reference = result.best_explored

    if not reference.throughput:
        return 1.0
    return measurement.throughput / reference.throughput


def explored_at(result: Result, shown: Iterable[Measurement]) -> str:
    """The best's throughput when explored, where it changed since and unverified rows are shown.

    These compare with that: a row could else read "10 % slower" beside a figure larger than the
    best's.
    """
    explored = result.best_explored
    if explored is None or result.best is None:
        return ""

    change = explored.throughput / result.best.throughput - 1
    if abs(change) <= _NOTICED:
        return ""

    compare_with_it = [row for row in shown if row.fits and not row.verified]
    if not compare_with_it:
        return ""

    when = f"when the best reached {rate(explored)}"
    return f"What is not verified was measured once, briefly, {when}."


def nearest_misses(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those that ran out of memory, the one that needed least first."""
    misses = [miss for miss in measurements if miss.outcome is Outcome.OUT_OF_MEMORY]
    return sorted(misses, key=_nearness)


def _nearness(measurement: Measurement) -> tuple[bool, int]:
    """Sorts by the memory that was needed; what failed otherwise comes last."""
    return measurement.outcome is not Outcome.OUT_OF_MEMORY, peak_bytes(measurement) or 2**63


def _verdict(measurement: Measurement, result: Result, tolerance: float) -> str:
    """What a row that fits says of itself."""
    words = []
    name = tier(measurement.config)
    leader = result.tiers.get(name)
    if leader and leader.config == measurement.config:
        words.append(f"best of {name}")

    if result.best is not None:
        speed = relative_speed(measurement, result)
        words.append(_why_lost(measurement, result.best, speed, tolerance))

    if not words:
        words.append("fits")
    words.append(verified(measurement))
    return ", ".join(filter(None, words))


def _why_lost(
    measurement: Measurement,
    best: Measurement,
    speed: float,
    tolerance: float,
) -> str:
    """Why a config that fits is not the best."""
    if speed < 1 - tolerance:
        return f"{percent(1 - speed)} slower"

    if speed > 1 + tolerance:
        cost = cost_in_faithfulness(measurement.config)
        if cost > cost_in_faithfulness(best.config):
            return f"{percent(speed - 1)} faster, learns less faithfully"
        # the finals hold every config that may be faster
        return "faster for a moment, and not measured again"

    tied = f"tied within {tolerance * 100:.3g} %"
    if _update_of(measurement.config) != _update_of(best.config):
        return f"{tied}, learns less faithfully"
    if (peak_bytes(measurement) or 0) > (peak_bytes(best) or 0):
        return f"{tied}, takes more memory"

    return tied


def _update_of(config: Config) -> list[str]:
    """What decides how faithfully a config learns."""
    # An optimizer's "-foreach" is another implementation of the same update.
    return [str(config.get(name)).removesuffix("-foreach") for name in FIDELITY_ORDER]
