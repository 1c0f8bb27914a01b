"""How every measured config stands to the best: the rows of the table, with the reason why each one lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autofit.core.config import Config
from autofit.core.knobs import FIDELITY_ORDER
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import Result, tier
from autofit.report.formatting import peak_bytes, percent, rate, why_not

_NOTICED = 0.05  # of a change between exploring and verifying, worth a line
_MISSES = 2  # configs that did not fit, in the table: enough to see where the budget ends


@dataclass(frozen=True)
class Standing:
    """A measurement and, in a few words, where it came in."""

    measurement: Measurement
    verdict: str
    best: bool = False


def standings(result: Result, *, tolerance: float, rows: int) -> list[Standing]:
    """The best, the best of every other tier, the fastest others, and the nearest of those that did not fit."""
    latest = latest_by_config(result)
    best = result.best
    leaders = [each for each in result.tiers.values() if each and best and each.config != best.config]
    places = {each.config for each in leaders}
    if best:
        places.add(best.config)
    rest = [each for each in latest.values() if each.config not in places]
    # The runner-up was verified with the best, so it is shown whatever else was fast when explored.
    first = result.runner_up.config if result.runner_up else None
    others = sorted((each for each in rest if each.fits), key=lambda each: (each.config != first, -each.throughput))
    misses = sorted((each for each in rest if not each.fits), key=_nearness)
    missed = misses[: min(_MISSES, max(1, rows // 3))]
    fitted = [*leaders, *others[: max(1, rows - len(leaders) - len(missed))]]
    fitted.sort(key=lambda each: -each.throughput)
    return [
        *([Standing(best, _mark("best", best), best=True)] if best else []),
        *(Standing(each, _verdict(each, result, tolerance)) for each in fitted),
        *(Standing(each, why_not(each, result.budget)) for each in missed),
    ]


def latest_by_config(result: Result) -> dict[Config, Measurement]:
    """Of every config its latest measurement: finalists were measured again."""
    verified = (*result.finalists, *result.tiers.values(), result.runner_up, result.best)
    return {each.config: each for each in (*result.trials, *verified) if each is not None}


def relative_speed(measurement: Measurement, result: Result) -> float:
    """Throughput against the best, measured the same way: verified runs with verified ones, explored with explored."""
    assert result.best, "there is a best to compare with"
    reference: Measurement = result.best
    if not measurement.verified:
        reference = next((each for each in result.trials if each.config == result.best.config), result.best)
    return measurement.throughput / reference.throughput if reference.throughput else 1.0


def explored_at(result: Result, shown: Iterable[Measurement]) -> str:
    """What figures among those shown that are not verified are to be held against, where that is not the best's; else a
    row would read "10 % slower" beside a figure larger than the best's."""
    explored = next((each for each in result.trials if result.best and each.config == result.best.config), None)
    if not explored or not result.best or abs(explored.throughput / result.best.throughput - 1) <= _NOTICED:
        return ""
    if not any(each.fits and not each.verified for each in shown):
        return ""
    return f"What is not verified was measured once, briefly, when the best reached {rate(explored)}."


def nearest_misses(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those that ran out of memory, the one that needed least first."""
    misses = [each for each in measurements if each.outcome is Outcome.OUT_OF_MEMORY]
    return sorted(misses, key=_nearness)


def _nearness(measurement: Measurement) -> tuple[bool, int]:
    return measurement.outcome is not Outcome.OUT_OF_MEMORY, peak_bytes(measurement) or 2**63


def _verdict(measurement: Measurement, result: Result, tolerance: float) -> str:
    kind = tier(measurement.config)
    leader = result.tiers.get(kind)
    words = [f"best of {kind}"] if leader and leader.config == measurement.config else []
    if result.best is not None:
        words.append(_why_lost(measurement, result.best, relative_speed(measurement, result), tolerance))
    return _mark(", ".join(words) or "fits", measurement)


def _why_lost(measurement: Measurement, best: Measurement, speed: float, tolerance: float) -> str:
    if speed < 1 - tolerance:
        return f"{percent(1 - speed)} slower"
    if speed > 1 + tolerance:
        return "faster for a moment, and not measured again"  # finals hold whoever may be faster
    tied = f"tied within {tolerance * 100:.3g} %"
    if _learning(measurement.config) != _learning(best.config):
        return f"{tied}, learns less faithfully"
    if (peak_bytes(measurement) or 0) > (peak_bytes(best) or 0):
        return f"{tied}, takes more memory"
    return tied


def _learning(config: Config) -> list[str]:
    values = [str(config.get(name)) for name in FIDELITY_ORDER]
    return [each.removesuffix("-foreach") for each in values]  # another implementation of the same update


def _mark(words: str, measurement: Measurement) -> str:
    return f"{words}, verified" if measurement.verified else words
