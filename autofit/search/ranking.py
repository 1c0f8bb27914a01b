"""Ranking: which measurement to recommend. Pure functions; the rule for ties is only here."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import TIERS, tier

Fidelity = Callable[[Config], tuple[int, ...]]


def fastest(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement of the highest throughput among those that fit; the earliest of equals."""
    fitting = [measurement for measurement in measurements if measurement.fits]
    return max(fitting, key=lambda measurement: measurement.throughput, default=None)


def recommend(measurements: Iterable[Measurement], *, tolerance: float, fidelity: Fidelity) -> Measurement | None:
    """The one to recommend: of those within `tolerance` of the fastest measured, the one that learns most faithfully.
    Among equally faithful ones the least peak of allocated memory decides, then throughput."""
    fitting = [each for each in measurements if each.fits]
    figures = [Figures(each.config, each.throughput, _allocated(each)) for each in fitting]
    index = preferred(figures, tolerance=tolerance, fidelity=fidelity)
    return None if index is None else fitting[index]


class Figures(NamedTuple):
    """A config that fits, with the figures that rank it, measured or predicted."""

    config: Config
    throughput: float
    nbytes: float


def preferred(figures: Sequence[Figures], *, tolerance: float, fidelity: Fidelity) -> int | None:
    """The index of the config to recommend, by the rule of `recommend`; None where there is none."""
    if not figures:
        return None
    enough = max(each.throughput for each in figures) * (1 - tolerance)
    tied = {index: each for index, each in enumerate(figures) if each.throughput >= enough}
    return max(tied, key=lambda index: (fidelity(tied[index].config), -tied[index].nbytes, tied[index].throughput))


def finalists(measurements: Iterable[Measurement], *, tolerance: float, fidelity: Fidelity) -> list[Measurement]:
    """The recommended one, then the one recommended without it, and so on."""
    left = list(measurements)
    chosen: list[Measurement] = []
    while best := recommend(left, tolerance=tolerance, fidelity=fidelity):
        chosen.append(best)
        left = [measurement for measurement in left if measurement.config != best.config]
    return chosen


def best_of_tiers(
    measurements: Iterable[Measurement], *, tolerance: float, fidelity: Fidelity
) -> dict[str, Measurement | None]:
    """The recommended one of each tier, None where nothing of it fits."""
    by_tier: dict[str, list[Measurement]] = {name: [] for name in TIERS}
    for measurement in measurements:
        by_tier[tier(measurement.config)].append(measurement)
    return {name: recommend(each, tolerance=tolerance, fidelity=fidelity) for name, each in by_tier.items()}


def nearest_miss(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement that ran out of device memory with the least peak; None when none did."""
    missed = [measurement for measurement in measurements if measurement.outcome is Outcome.OUT_OF_MEMORY]
    return min(missed, key=_allocated, default=None)


def _allocated(measurement: Measurement) -> float:
    return measurement.peak_bytes.allocated if measurement.peak_bytes else math.inf
