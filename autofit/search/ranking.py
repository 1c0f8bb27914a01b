"""Ranking: which measurement to recommend. Pure functions; the rule for ties is only here."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import TIERS, tier
from autofit.search.objectives import Objective
from autofit.search.objectives.discounted import RAW_SPEED

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
    among equally faithful ones the one that needs the fewest optional packages, then the one with
    the least peak of allocated memory, then the best by the objective.

    Args:
        tolerance: a share of the best.
        fidelity: sorts configs by how faithfully they learn, the most faithful last.
        packages: how many optional packages a config needs.
    """

    tolerance: float
    fidelity: Fidelity
    objective: Objective = RAW_SPEED
    packages: Callable[[Config], int] = lambda config: 0

    def tied(self, figures: Sequence[Figures]) -> list[int]:
        """The indices of those that are too close to the best to call."""
        enough = max((row.value for row in figures), default=0.0) * (1 - self.tolerance)
        return [index for index, row in enumerate(figures) if row.value >= enough]

    def preferred(self, figures: Sequence[Figures]) -> int | None:
        """The index of the config to recommend; None where there is no config.

        Args:
            figures: of configs that fit.
        """

        def merit(index: int) -> tuple[tuple[int, ...], int, float, float]:
            config, value, nbytes = figures[index]
            return self.fidelity(config), -self.packages(config), -nbytes, value

        return max(self.tied(figures), key=merit, default=None)

    def recommend(self, measurements: Iterable[Measurement]) -> Measurement | None:
        """The measurement to recommend among those that fit."""
        fitting = [measurement for measurement in measurements if measurement.fits]
        index = self.preferred(self._figures(fitting))
        return None if index is None else fitting[index]

    def close_calls(self, best: Measurement, measurements: Iterable[Measurement]) -> Measurements:
        """The measurements of other configs within the tolerance of the best by the objective."""
        others = [seen for seen in measurements if seen.fits and seen.config != best.config]
        figures = self._figures([best, *others])
        return [others[index - 1] for index in self.tied(figures) if index]

    def _figures(self, fitting: Measurements) -> list[Figures]:
        figures = []
        for measurement in fitting:
            value = self.value(measurement)
            figures.append(Figures(measurement.config, value, _allocated(measurement)))

        return figures

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


# Of any two configs the faster one.
BY_SPEED = Ranking(0.0, lambda config: ())


def fastest(
    measurements: Iterable[Measurement],
    objective: Objective = RAW_SPEED,
) -> Measurement | None:
    """The measurement that is best by the objective among those that fit; the earliest of
    equals."""
    fitting = [measurement for measurement in measurements if measurement.fits]
    return max(fitting, key=lambda seen: objective(seen, seen.config), default=None)


def nearest_miss(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement that ran out of device memory with the least peak; None when none did."""
    missed = [seen for seen in measurements if seen.outcome is Outcome.OUT_OF_MEMORY]
    return min(missed, key=_allocated, default=None)


def _allocated(measurement: Measurement) -> float:
    """Peak bytes of tensors, or infinity where unknown."""
    return measurement.peak_bytes.allocated if measurement.peak_bytes else math.inf
