"""Ranking: which measurement to recommend. Pure functions; the rule for ties is only here."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import TIERS, tier
from autofit.search.objectives import Objective
from autofit.search.objectives.throughput import throughput

Fidelity = Callable[[Config], tuple[int, ...]]
Measurements = Sequence[Measurement]


class Figures(NamedTuple):
    """A config that fits, with the figures that rank it, measured or predicted."""

    config: Config
    value: float  # of the objective
    nbytes: float


@dataclass(frozen=True)
class Ranking:
    """The rule by which a config is recommended.

    Of those within `tolerance` of the best by the objective, the one that learns most faithfully;
    among equally faithful ones the one with the least peak of allocated memory, then the best by
    the objective.

    Args:
        tolerance: a share of the best.
        fidelity: sorts configs by how faithfully they learn, the most faithful last.
    """

    tolerance: float
    fidelity: Fidelity
    objective: Objective = throughput

    def preferred(self, figures: Sequence[Figures]) -> int | None:
        """The index of the config to recommend; None where there is no config.

        Args:
            figures: of configs that fit.
        """
        if not figures:
            return None

        enough = max(row.value for row in figures) * (1 - self.tolerance)
        tied = [index for index, row in enumerate(figures) if row.value >= enough]

        def merit(index: int) -> tuple[tuple[int, ...], float, float]:
            config, value, nbytes = figures[index]
            return self.fidelity(config), -nbytes, value

        return max(tied, key=merit)

    def recommend(self, measurements: Iterable[Measurement]) -> Measurement | None:
        """The measurement to recommend among those that fit."""
        fitting = [measurement for measurement in measurements if measurement.fits]
        figures = []
        for measurement in fitting:
            value = self.value(measurement)
            figures.append(Figures(measurement.config, value, _allocated(measurement)))

        index = self.preferred(figures)
        return None if index is None else fitting[index]

    def value(self, measurement: Measurement) -> float:
        """What the objective says of a measurement."""
        return self.objective(measurement, measurement.config)

    def finalists(self, measurements: Iterable[Measurement]) -> list[Measurement]:
        """The recommended one, then the one recommended without it, and so on."""
        left = list(measurements)
        chosen = []
        while best := self.recommend(left):
            chosen.append(best)
            left = [measurement for measurement in left if measurement.config != best.config]

        return chosen

    def best_of_tiers(self, measurements: Iterable[Measurement]) -> dict[str, Measurement | None]:
        """The recommended one of each tier, None where nothing of it fits."""
        candidates = list(measurements)
        best = {}
        for name in TIERS:
            of_tier = (candidate for candidate in candidates if tier(candidate.config) == name)
            best[name] = self.recommend(of_tier)

        return best


def fastest(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement of the highest throughput among those that fit; the earliest of equals."""
    fitting = [measurement for measurement in measurements if measurement.fits]
    return max(fitting, key=lambda measurement: measurement.throughput, default=None)


def nearest_miss(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement that ran out of device memory with the least peak; None when none did."""
    missed = [seen for seen in measurements if seen.outcome is Outcome.OUT_OF_MEMORY]
    return min(missed, key=_allocated, default=None)


def _allocated(measurement: Measurement) -> float:
    """Peak bytes of tensors, or infinity where unknown."""
    return measurement.peak_bytes.allocated if measurement.peak_bytes else math.inf
