"""Prior measurements: what earlier searches measured of a workload. They guide this search; they are no results of it.

Speeds of another day are compared with each other, not with today's: one search's may all be slower or faster. Memory
is the same every day, so a measurement within one budget is informative for another.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.search.encoding import Encoding, Mask
from autofit.search.linear_model import Array
from autofit.search.pruning import MemoryOrder, ruled_out

# Standard deviations of logarithms: of the error that all speeds of an earlier search share, and of each one's own
# beside the noise of a measurement. In replays (benchmarks.replay, --known 10, on a day 15 % slower) a shared error of
# 0 ended searches too soon (regret 0.5 %, not 0.1 %); 0.4, or an own one of 0 or 0.06, changed little.
_DAY, _OWN = 0.15, 0.03
_MOST_TIMED = 48  # earlier speeds, the fastest that fit: each makes scoring a large space slower


@dataclass(frozen=True)
class PriorMeasurement:
    """An earlier measurement of a config, within the budget of this search."""

    config: Config
    session: int = 1  # the search that measured it
    step_seconds: float | None = None  # None where no step was timed
    peak_bytes: int | None = None  # of tensors; None where the run did not get so far
    outgrew: bool = False  # it probably takes more memory than there is now
    proven: bool = False  # it surely does
    works: bool = True  # it did not crash, hang or diverge


def prior_measurement(
    measurement: Measurement, session: int, *, then: int, now: int, exact: bool
) -> PriorMeasurement | None:
    """What a measurement says within the budget of this search; None for nothing. Tensors could take `then` bytes when
    it was measured, and may take `now`; `exact`: their peak is the same on every run and alone decides what fits, as on
    the CPU."""
    config, outcome = measurement.config, measurement.outcome
    if outcome is Outcome.HOST_OUT_OF_MEMORY:  # it depends on what was free on that day
        return None
    if not measurement.fits and outcome is not Outcome.OUT_OF_MEMORY:
        return PriorMeasurement(config, session, works=False)
    least = measurement.peak_bytes.allocated if measurement.peak_bytes else 0
    ended = measurement.fits or measurement.warmup_seconds > 0  # the warm-up ends after the peak
    proven = least > now and exact
    outgrew = least > now or (not measurement.fits and now <= then and not (ended and exact))
    if not ended and not outgrew:
        return None
    seconds = measurement.step_seconds.median if measurement.step_seconds else None
    peak_bytes = least if ended and least else None
    return PriorMeasurement(config, session, seconds, peak_bytes, outgrew=outgrew, proven=proven)


@dataclass(frozen=True)
class _Timed:
    """The speed of a config in one search: the mean of `count` measurements."""

    outgrew: bool
    seconds: float
    config: Config
    session: int
    count: int


class PriorMeasurements:
    """All earlier measurements, as the surrogate needs them."""

    def __init__(self, measurements: Sequence[PriorMeasurement] = ()) -> None:
        self._proven = sorted((each for each in measurements if each.proven), key=lambda each: each.peak_bytes or 0)
        self._timed = _timed(measurements)
        self.configs = [each.config for each in self._timed]
        self.speeds: Array = -np.log([each.seconds for each in self._timed])  # of these, in steps per second
        sizes = {each.config: each.peak_bytes for each in measurements if each.peak_bytes}  # the same on every day
        self.sizes = list(sizes.items())
        # Those that take too many bytes, their number being unknown.
        self.outgrew = list({each.config: None for each in measurements if each.outgrew and each.config not in sizes})
        self.works = list({each.config: each.works for each in measurements}.items())
        self.fits = {each.config for each in measurements if each.works and not each.outgrew}  # this budget

    def noise(self, measured: int, noise: float) -> Array:
        """The covariance of the errors of `measured` speeds of today, each with that noise, and of the earlier ones."""
        sessions = np.array([0] * measured + [each.session for each in self._timed])
        own = [noise**2] * measured + [noise**2 / each.count + _OWN**2 for each in self._timed]
        together = (sessions[:, None] == sessions[None, :]) & (sessions > 0)
        return np.asarray(np.diag(own) + _DAY**2 * together)

    def not_outgrown(self, pool: Encoding, memory_order: MemoryOrder) -> Mask:
        """Which configs of a pool are not proven to take too much memory."""
        left = np.ones(len(pool.codes), dtype=bool)
        for each in self._proven:
            left &= ~ruled_out(each.config, pool, memory_order)
        return left


def _timed(measurements: Sequence[PriorMeasurement]) -> list[_Timed]:
    """The timed ones by config and session: the fastest, those that fit first."""
    times: dict[tuple[Config, int], list[float]] = {}
    for each in measurements:
        if each.step_seconds:
            times.setdefault((each.config, each.session), []).append(each.step_seconds)
    outgrew = {each.config for each in measurements if each.outgrew}
    found = [
        _Timed(config in outgrew, statistics.geometric_mean(seconds), config, session, len(seconds))
        for (config, session), seconds in times.items()
    ]
    return sorted(found, key=lambda each: (each.outgrew, each.seconds))[:_MOST_TIMED]
