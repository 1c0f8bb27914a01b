"""What earlier searches measured of a workload: knowledge for this one, no results of it.

Speeds of another day are compared with each other, not with today's: all that one search measured may be slower or
faster together. Memory is the same every day, so that what was seen within one budget says something about another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.search.encoding import Columns, Mask
from autofit.search.linear_model import Array
from autofit.search.pruning import MemoryOrder, ruled_out

# Standard deviations of logarithms: of what all speeds of an earlier search are off by together, and of what each is
# off by beside the noise of every measurement. In replays (benchmarks.replay, --known 10, on a day 15 % slower) a
# day of 0 ended searches too soon (regret 0.5 %, not 0.1 %); 0.4, or 0 or 0.06 of their own, changed little.
_DAY, _OWN = 0.15, 0.03
_MOST_TIMED = 48  # speeds of earlier searches, the fastest that fit: each makes weighing a large space slower


@dataclass(frozen=True)
class PriorMeasurement:
    """What an earlier measurement of a config says within the budget of this search.

    session: which search it was, from 1. step_seconds: None where no step was timed. peak_bytes: of tensors; None where
    the run did not get so far. outgrew: it took more memory than there is now, as far as that can be told; proven: and
    will whenever it is run. works: it did not crash, hang or diverge.
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
    """What a measurement says now; None where that is nothing.

    Args:
        then, now: bytes that tensors might take when it was measured, and may take in this search.
        exact: peaks of tensors are the same on every run, and decide alone whether a config fits: so on the CPU.
    """
    config, outcome = measurement.config, measurement.outcome
    if outcome is Outcome.HOST_OUT_OF_MEMORY:  # by what was free on that day
        return None
    if not measurement.fits and outcome is not Outcome.OUT_OF_MEMORY:
        return PriorMeasurement(config, session, works=False)
    least = measurement.peak_bytes.allocated if measurement.peak_bytes else 0
    ended = measurement.fits or measurement.warmup_seconds > 0  # which is timed where the peak has been reached
    proven = least > now and exact
    outgrew = least > now or (not measurement.fits and now <= then and not (ended and exact))
    if not ended and not outgrew:
        return None
    seconds = measurement.step_seconds.median if measurement.step_seconds else None
    return PriorMeasurement(
        config, session, seconds, least if ended and least else None, outgrew=outgrew, proven=proven
    )


@dataclass(frozen=True)
class _Timed:
    """The speed of a config in one search, by so many measurements."""

    outgrew: bool
    seconds: float
    config: Config
    session: int
    count: int


class PriorMeasurements:
    """All that is known, as surrogate need it.

    Attributes:
        configs, speeds: of those that were timed, with the logarithm of steps per second.
        sizes: configs with the bytes of tensors that they took.
        outgrew: configs of which only that they take too many is known.
        works: configs, and whether they worked.
        fits: the configs that were seen to fit this budget.
    """

    def __init__(self, known: Sequence[PriorMeasurement] = ()) -> None:
        self._proven = sorted((each for each in known if each.proven), key=lambda each: each.peak_bytes or 0)
        self._timed = _timed(known)
        self.configs = [each.config for each in self._timed]
        self.speeds: Array = -np.log([each.seconds for each in self._timed])
        sizes = {each.config: each.peak_bytes for each in known if each.peak_bytes}  # the same on every day
        self.sizes = list(sizes.items())
        self.outgrew = list({each.config: None for each in known if each.outgrew and each.config not in sizes})
        self.works = list({each.config: each.works for each in known}.items())
        self.fits = {each.config for each in known if each.works and not each.outgrew}

    def noise(self, measured: int, noise: float) -> Array:
        """The covariance of the errors of so many speeds of today, each with that noise, and of those here."""
        sessions = np.array([0] * measured + [each.session for each in self._timed])
        own = [noise**2] * measured + [noise**2 / each.count + _OWN**2 for each in self._timed]
        together = (sessions[:, None] == sessions[None, :]) & (sessions > 0)
        return np.asarray(np.diag(own) + _DAY**2 * together)

    def not_outgrown(self, pool: Columns, memory_order: MemoryOrder) -> Mask:
        """Which configs of a pool are not proven to take too much memory."""
        left = np.ones(len(pool.codes), dtype=bool)
        for each in self._proven:
            left &= ~ruled_out(each.config, pool, memory_order)
        return left


def _timed(known: Sequence[PriorMeasurement]) -> list[_Timed]:
    """The fastest of them, those that fit before the others."""
    times: dict[tuple[Config, int], list[float]] = {}
    for each in known:
        if each.step_seconds:
            times.setdefault((each.config, each.session), []).append(each.step_seconds)
    outgrew = {each.config for each in known if each.outgrew}
    found = [
        _Timed(config in outgrew, statistics.geometric_mean(seconds), config, session, len(seconds))
        for (config, session), seconds in times.items()
    ]
    return sorted(found, key=lambda each: (each.outgrew, each.seconds))[:_MOST_TIMED]
