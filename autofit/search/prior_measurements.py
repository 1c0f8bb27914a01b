"""Prior measurements: what earlier searches measured of a workload. They guide this search, and are
no results of it.

Speeds of another day are compared with each other, not with today's: one search's may all be slower
or faster. Memory is the same every day, so a measurement within one budget informs another.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.search.encoding import Encoding, Mask
from autofit.search.linear_model import Array
from autofit.search.pruning import MemoryOrder, ruled_out

# Standard deviations of logarithms: of the error that all speeds of an earlier search share, and of
# each one's own beside the noise of a measurement. In replays (benchmarks.replay, --known 10, on a
# day 15 % slower) a shared error of 0 ended searches too soon (regret 0.5 %, not 0.1 %); 0.4, or an
# own one of 0 or 0.06, changed little.
_DAY = 0.15
_OWN = 0.03
_MOST_TIMED = 48  # earlier speeds, the fastest that fit: each makes scoring a large space slower


@dataclass(frozen=True)
class PriorMeasurement:
    """An earlier measurement of a config, within the budget of this search.

    Attributes:
        session: the search that measured it.
        step_seconds: None where no step was timed.
        peak_bytes: of tensors; None where the run did not get so far.
        outgrew: whether it probably takes more memory than there is now.
        proven: whether it surely does.
        works: whether it did not crash, hang or diverge.
    """

    config: Config
    session: int = 1
    step_seconds: float | None = None
    peak_bytes: int | None = None
    outgrew: bool = False
    proven: bool = False
    works: bool = True


def prior_measurement(
    measurement: Measurement, session: int, *, then: int, now: int, exact: bool
) -> PriorMeasurement | None:
    """What a measurement says within the budget of this search; None for nothing.

    Args:
        session: the search that measured it.
        then: the bytes that tensors could take when it was measured.
        now: those that they may take.
        exact: whether their peak is the same on every run and alone decides what fits, as on a CPU.
    """
    config = measurement.config
    missed = measurement.outcome is Outcome.OUT_OF_MEMORY
    if measurement.outcome is Outcome.HOST_OUT_OF_MEMORY:  # depends on what was free on that day
        return None
    if not measurement.fits and not missed:
        return PriorMeasurement(config, session, works=False)

    least = measurement.peak_bytes.allocated if measurement.peak_bytes else 0
    reached_peak = measurement.fits or measurement.warmup_seconds > 0  # warm-up ends after the peak
    known = exact and reached_peak
    outgrew = least > now or (missed and now <= then and not known)
    if not reached_peak and not outgrew:
        return None

    return PriorMeasurement(
        config,
        session,
        step_seconds=measurement.step_seconds.median if measurement.step_seconds else None,
        peak_bytes=least if reached_peak and least else None,
        outgrew=outgrew,
        proven=exact and least > now,
    )


@dataclass(frozen=True)
class _Timed:
    """The speed of a config in one search: the mean of `count` measurements."""

    outgrew: bool
    seconds: float
    config: Config
    session: int
    count: int


class PriorMeasurements:
    """All earlier measurements, as the surrogate needs them.

    Attributes:
        configs: those that were timed.
        speeds: of these, logarithms of steps per second.
        sizes: peak bytes by config.
        outgrew: the configs that take too many bytes, their number being unknown.
        works: by config, whether it does.
        fits: the configs that work and fit within this budget.
    """

    def __init__(self, measurements: Sequence[PriorMeasurement] = ()) -> None:
        self._timed = _timed(measurements)
        self.configs = [timed.config for timed in self._timed]
        self.speeds: Array = -np.log([timed.seconds for timed in self._timed])

        self._proven: list[PriorMeasurement] = []
        self.sizes: dict[Config, int] = {}
        self.works: dict[Config, bool] = {}
        self.fits: set[Config] = set()
        outgrew: dict[Config, None] = {}
        for measurement in measurements:
            config = measurement.config
            self.works[config] = measurement.works
            if measurement.proven:
                self._proven.append(measurement)
            if measurement.peak_bytes:
                self.sizes[config] = measurement.peak_bytes
            if measurement.outgrew:
                outgrew[config] = None
            elif measurement.works:
                self.fits.add(config)

        self._proven.sort(key=lambda measurement: measurement.peak_bytes or 0)
        self.outgrew = [config for config in outgrew if config not in self.sizes]

    def noise(self, measured: int, noise: float) -> Array:
        """The covariance of the errors of speeds of today, then of the earlier ones.

        Args:
            measured: how many speeds are of today.
            noise: standard deviation of a measurement's logarithm.
        """
        own = [noise**2] * measured
        sessions = [0] * measured  # of today
        for timed in self._timed:
            own.append(noise**2 / timed.count + _OWN**2)
            sessions.append(timed.session)

        days = np.array(sessions)
        same_day = (days[:, None] == days[None, :]) & (days > 0)
        return np.asarray(np.diag(own) + _DAY**2 * same_day)

    def not_outgrown(self, pool: Encoding, memory_order: MemoryOrder) -> Mask:
        """Which configs of a pool are not proven to take too much memory."""
        left = np.ones(len(pool.codes), dtype=bool)
        for measurement in self._proven:
            left &= ~ruled_out(measurement.config, pool, memory_order)

        return left


def _timed(measurements: Sequence[PriorMeasurement]) -> list[_Timed]:
    """The timed ones by config and session: the fastest, those that fit first."""
    outgrew = set()
    times: dict[tuple[Config, int], list[float]] = defaultdict(list)
    for measurement in measurements:
        if measurement.outgrew:
            outgrew.add(measurement.config)
        if measurement.step_seconds:
            times[measurement.config, measurement.session].append(measurement.step_seconds)

    found = []
    for (config, session), seconds in times.items():
        timed = _Timed(
            config in outgrew,
            statistics.geometric_mean(seconds),
            config,
            session,
            len(seconds),
        )
        found.append(timed)

    found.sort(key=lambda timed: (timed.outgrew, timed.seconds))
    return found[:_MOST_TIMED]
