"""The rows of the result table: every measured config against the best, and why each one lost."""

from collections.abc import Iterable, Mapping
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
    """The best, the best of every other tier, the fastest others, and the nearest of those that did not fit."""
    latest, best = latest_by_config(result), result.best
    leaders = [
        leader
        for leader in result.tiers.values()
        if leader and best and leader.config != best.config
    ]
    leading = {leader.config for leader in (*leaders, best) if leader}
    others = [one for one in latest.values() if one.config not in leading]
    # The runner-up was verified with the best, so it is shown whatever else was fast when explored.
    second = result.runner_up.config if result.runner_up else None
    fitting = sorted(
        (one for one in others if one.fits), key=lambda one: (one.config != second, -one.throughput)
    )
    misses = sorted((one for one in others if not one.fits), key=_nearness)[
        : min(_MISSES, max(1, rows // 3))
    ]
    fitted = [*leaders, *fitting[: max(1, rows - len(leaders) - len(misses))]]
    fitted.sort(key=lambda one: -one.throughput)
    return [
        *(
            [Row(best, ", ".join(filter(None, ("best", verified(best)))), best=True)]
            if best
            else []
        ),
        *(Row(one, _verdict(one, result, tolerance)) for one in fitted),
        *(Row(one, why_not(one, result.budget)) for one in misses),
    ]


def drawn_trials(result: Result) -> list[int]:
    """The places of the trials that a page draws: all, or else the leading configs, the fastest trials, and some from
    each part of the search."""
    trials = result.trials
    if len(trials) <= MOST_DRAWN:
        return list(range(len(trials)))

    leaders = (*result.finalists, *result.tiers.values(), result.runner_up, result.best)
    leading = {leader.config for leader in leaders if leader}
    places = [place for place, trial in enumerate(trials) if trial.config in leading]
    half = MOST_DRAWN // 2
    by_speed = sorted(range(len(trials)), key=lambda place: -trials[place].throughput)
    evenly = range(0, len(trials), -(-len(trials) // half))
    chosen = dict.fromkeys((*places, *evenly, *by_speed))
    return sorted(list(chosen)[:MOST_DRAWN])


def latest_by_config(result: Result) -> Mapping[Config, Measurement]:
    """Of every config its latest measurement: finalists were measured again."""
    return result.latest_by_config


def relative_speed(measurement: Measurement, result: Result) -> float:
    """Throughput against the best, measured the same way: verified runs with verified ones, explored with explored."""
    assert result.best, "there is a best to compare with"
    reference = result.best if measurement.verified else result.best_explored or result.best
    return measurement.throughput / reference.throughput if reference.throughput else 1.0


def explored_at(result: Result, shown: Iterable[Measurement]) -> str:
    """The best's throughput when explored, where the unverified rows shown compare with that and it changed since. Else
    a row could read "10 % slower" beside a figure larger than the best's."""
    explored = result.best_explored
    if (
        not explored
        or not result.best
        or abs(explored.throughput / result.best.throughput - 1) <= _NOTICED
    ):
        return ""
    if all(one.verified or not one.fits for one in shown):
        return ""
    return (
        f"What is not verified was measured once, briefly, when the best reached {rate(explored)}."
    )


def nearest_misses(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those that ran out of memory, the one that needed least first."""
    return sorted(
        (one for one in measurements if one.outcome is Outcome.OUT_OF_MEMORY), key=_nearness
    )


def _nearness(measurement: Measurement) -> tuple[bool, int]:
    return measurement.outcome is not Outcome.OUT_OF_MEMORY, peak_bytes(measurement) or 2**63


def _verdict(measurement: Measurement, result: Result, tolerance: float) -> str:
    name = tier(measurement.config)
    leader = result.tiers.get(name)
    words = [f"best of {name}"] if leader and leader.config == measurement.config else []
    if result.best is not None:
        words.append(
            _why_lost(measurement, result.best, relative_speed(measurement, result), tolerance)
        )
    return ", ".join(filter(None, [*(words or ["fits"]), verified(measurement)]))


def _why_lost(measurement: Measurement, best: Measurement, speed: float, tolerance: float) -> str:
    if speed < 1 - tolerance:
        return f"{percent(1 - speed)} slower"
    is_lossier = cost_in_faithfulness(measurement.config) > cost_in_faithfulness(best.config)
    if speed > 1 + tolerance and is_lossier:
        return f"{percent(speed - 1)} faster, learns less faithfully"
    if speed > 1 + tolerance:
        return "faster for a moment, and not measured again"  # the finals hold every config that may be faster
    tied = f"tied within {tolerance * 100:.3g} %"
    # An optimizer's "-foreach" is another implementation of the same update.
    mine, others = (
        [str(config.get(name)).removesuffix("-foreach") for name in FIDELITY_ORDER]
        for config in (measurement.config, best.config)
    )
    if mine != others:
        return f"{tied}, learns less faithfully"
    return (
        f"{tied}, takes more memory"
        if (peak_bytes(measurement) or 0) > (peak_bytes(best) or 0)
        else tied
    )
