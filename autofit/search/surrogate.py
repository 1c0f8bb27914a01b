"""What is expected of configs: how fast, how large, and whether they work at all, given the measurements so far.

Everything here is a guess, and only chooses what to measure next, says when to stop, and tells noise from speed: it
never excludes a config.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autofit.core.config import Config, Value
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.search.costs import Costs
from autofit.search.drift import as_now
from autofit.search.encoding import MICRO_BATCH, Columns, Mask, Places
from autofit.search.gaussian_process import GaussianProcess, Mixture
from autofit.search.linear_model import Array, Features, LinearModel, normal_below, normal_density
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurements
from autofit.search.pruning import MemoryOrder
from autofit.search.ranking import fastest

# What is expected before any probe, as natural logarithms, each with how sure that is. Without predictions, chosen on
# synthetic problems like those of the tests, and not delicate: with any one of these halved or doubled, the mean regret
# after 16 probes of 160 problems stayed between 1 % and 3.5 %. The memory slope was picked on those same problems, so
# the figures flatter it.
_MEMORY_SLOPE, _MEMORY_SLOPE_DEVIATION = 0.3, 0.3  # per doubling of the micro-batch
_MEMORY_SPAN, _MEMORY_DEVIATION = 0.7, 0.25  # from a knob's most frugal value to its least
_SPEED_SLOPE, _SPEED_SLOPE_DEVIATION = 0.3, 0.2  # larger micro-batches fill the device better
_SPEED_DEVIATION = 0.25
_GUESSED_MEMORY_NOISE = 0.03  # of what effects that only add cannot express
# Where there are predictions, the effects on memory are of what these are off by: with 0.012 to 0.035 over the recorded
# tables (of benchmarks/searches) that is what was seen on the CPU.
_OFF_MEMORY, _MEMORY_NOISE = 0.03, 0.01
SPEED_NOISE = 0.04  # between two probes of one config, on machines that others use too
_BEYOND = 0.2  # how far past the limit an out-of-memory is taken to lie; it says only that it lies past it
_WORKS_DEVIATION, _WORKS_NOISE = 0.5, 0.2  # of 1 for a config that works and 0 for one that does not
_HARDLY = 0.05  # to fit and to work: what is less likely than that is not reckoned with
_AT_MOST = 0.05  # what may be faster yet with that probability is no reason to go on
_MORE_LIKELY = 0.5  # than not
_EXACT = 1e-4


@dataclass(frozen=True)
class Speeds:
    """Log steps per second of configs; `best` is the highest expected of any that was measured to fit."""

    expected: Mixture
    best: float

    def improvement(self) -> Array:
        """Expected improvement over the best (Jones et al. 1998, equation 15); of what is expected, if none."""
        means, deviations = self.expected.means, self.expected.deviations
        z = (means - self.best) / deviations if math.isfinite(self.best) else np.zeros(means.shape)
        gain = deviations * (z * normal_below(z) + normal_density(z))
        return np.asarray(self.expected.weights @ gain)

    def of(self, some: Mask) -> Speeds:
        """Of some of the configs."""
        few = replace(self.expected, means=self.expected.means[:, some], deviations=self.expected.deviations[:, some])
        return replace(self, expected=few)

    def chance_above(self, share: float) -> Array:
        """How likely each is to be faster than the best by more than that share of it."""
        z = (self.expected.means - self.best - math.log1p(share)) / self.expected.deviations
        return np.asarray(self.expected.weights @ normal_below(z))


@dataclass(frozen=True)
class Group:
    """Configs, and what can be told of them before anything is measured: predictions are logarithms, 0 without any."""

    configs: Sequence[Config]
    rows: Array
    nbytes: Array
    speed: Array


class Surrogate:
    """About the configs of a pool, and others like them.

    Args:
        values: every value each searched knob takes in the space, expected memory rising.
        memory_order: proven ranks of memory, `Technique.memory_order`.
        memory_bytes: what tensors may take; None when unknown, then it is guessed from what fitted and what did not.
        expected: what is predicted of the pool; None where nothing is.
    """

    def __init__(
        self,
        values: Mapping[str, tuple[Value, ...]],
        pool: Sequence[Config],
        *,
        memory_order: MemoryOrder,
        memory_bytes: int | None = None,
        expected: Predictions | None = None,
    ) -> None:
        self.values, self.memory_order = values, memory_order
        self.past = PriorMeasurements()
        self._expected = expected
        self._memory_bytes = memory_bytes
        self._told: dict[str, tuple[Any, Any]] = {}  # of the pool: after which measurements, what
        self._features = Features(values)
        self.pool, self.columns = self.group(pool), Columns(pool)
        knobs = [knob for knob, each in values.items() if len(each) > 1]
        self._residuals = GaussianProcess(knobs, self.columns, noise=SPEED_NOISE)
        self._costs = Costs(self._features)
        self._frugality = _frugality(values, self._features, memory_order)
        self._least = float(min(self.pool.rows @ self._frugality, default=0.0))

    def knowing(self, past: PriorMeasurements) -> Surrogate:
        """The same, with what earlier searches measured."""
        found = copy.copy(self)
        found.past, found._told = past, {}
        return found

    @property
    def informed(self) -> bool:
        """Whether anything is predicted of the pool, or known to fit."""
        return self._expected is not None or bool(self.past.fits)

    def group(self, configs: Sequence[Config]) -> Group:
        """Configs to ask about."""
        none = np.zeros(len(configs))
        nbytes = none if self._expected is None else self._expected.log_bytes(configs)
        speed = none if self._expected is None else self._expected.log_throughput(configs)
        return Group(configs, self._features.rows(configs), nbytes, speed)

    def speeds(
        self, measurements: Sequence[Measurement], group: Group, rivals: Sequence[Measurement] | None = None
    ) -> Speeds:
        """How fast configs are expected to be, and the best of some measurements; None: of all."""
        steady = as_now(measurements, noise=SPEED_NOISE)
        timed = [(each.config, each.step_seconds.median) for each in steady if each.fits and each.step_seconds]
        at = self.group([*(config for config, _ in timed), *self.past.configs])
        values = np.concatenate([-np.log([seconds for _, seconds in timed]), self.past.speeds])
        told = {each.config for each in (measurements if rivals is None else rivals)}
        among = [config in told for config, _ in timed] + [False] * len(self.past.configs)
        best = float(self._speed(at, values, at).mean[among].max(initial=-math.inf))
        found = self._once("speeds", measurements, group, lambda: self._speed(at, values, group))
        return Speeds(found, best)

    def _once(self, what: str, measurements: Sequence[Measurement], group: Group, notify: Callable[[], Any]) -> Any:
        """What is told of the whole pool is asked several times before the next measurement."""
        if group is not self.pool:
            return notify()
        seen = tuple((each.number, each.config, each.outcome) for each in measurements)
        if what not in self._told or self._told[what][0] != seen:
            self._told[what] = seen, notify()
        return self._told[what][1]

    def _speed(self, at: Group, values: Array, group: Group) -> Mixture:
        noise = self.past.noise(len(values) - len(self.past.configs), SPEED_NOISE)
        if self._expected is not None:
            asked = None if group is self.pool else group.configs
            off = self._residuals.predict(at.configs, values - at.speed, asked, noise=noise)
            return replace(off, means=off.means + group.speed)
        mean = np.zeros(self._features.width)
        mean[1] = _SPEED_SLOPE
        prior = LinearModel.prior(mean, slope=_SPEED_SLOPE_DEVIATION, value=_SPEED_DEVIATION)
        means, deviations = prior.learn(at.rows, values, noise).predict(group.rows)
        return Mixture(np.ones(1), means[None, :], np.maximum(deviations, 1e-9)[None, :])

    def leader(self, measurements: Sequence[Measurement]) -> Measurement | None:
        """The latest measurement of the config that is expected to be the fastest of those that fit."""
        best = fastest(self.settled(measurements))
        return next((each for each in reversed(measurements) if best and each.config == best.config), None)

    def settled(self, measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
        """Of every config that fits its latest measurement, with the step time that is expected of it given all.

        Where nothing is predicted that is the mean of its own: effects that only add are too rough to doubt those for.
        """
        latest = {each.config: each for each in measurements if each.fits and each.step_seconds}
        if self._expected is None:
            times: dict[Config, list[float]] = {}
            for each in as_now(measurements, noise=SPEED_NOISE):
                if each.fits and each.step_seconds:
                    times.setdefault(each.config, []).append(each.step_seconds.median)
            return tuple(each.taking(statistics.geometric_mean(times[config])) for config, each in latest.items())
        means = self.speeds(measurements, self.group(list(latest))).expected.mean
        return tuple(each.taking(math.exp(-mean)) for each, mean in zip(latest.values(), means.tolist(), strict=True))

    def most_likely(self, measurements: Sequence[Measurement], configs: Sequence[Config]) -> list[Measurement]:
        """What probes of configs would most likely show; their numbers, which no measurement has, are below 0."""
        group = self.group(configs)
        seconds = np.exp(-self.speeds(measurements, group).expected.mean).tolist()
        sizes = np.exp(self.memory(measurements, group)[0]).astype(int).tolist()
        fits = (self.chances(measurements, group) >= _MORE_LIKELY).tolist()
        return [
            Measurement(config, Outcome.FITS, -1 - at, StepSeconds(*[seconds[at]] * 3), peak_bytes=PeakBytes(sizes[at]))
            if fits[at]
            else Measurement(config, Outcome.OUT_OF_MEMORY, -1 - at)
            for at, config in enumerate(configs)
        ]

    def chances(self, measurements: Sequence[Measurement], group: Group) -> Array:
        """How likely configs are to fit and to work."""
        found: Array = self._once("chances", measurements, group, lambda: self._chances(measurements, group))
        return found

    def _chances(self, measurements: Sequence[Measurement], group: Group) -> Array:
        memory, deviation, limit = self.memory(measurements, group)
        noise = _GUESSED_MEMORY_NOISE if self._expected is None else _MEMORY_NOISE
        return normal_below((limit - memory) / np.hypot(deviation, noise)) * self.works(measurements, group)

    def cost(self, measurements: Sequence[Measurement], group: Group, places: Places | slice = slice(None)) -> Array:
        """What a probe of each, or of those at some places, is expected to take in seconds."""
        return self._costs.seconds(measurements, group.rows[places])

    def may_beat(
        self, measurements: Sequence[Measurement], left: Mask, share: float, rivals: Sequence[Measurement] | None = None
    ) -> bool:
        """Whether any of the pool's configs that are left may be faster than the best by more than a share of it.

        That is told at 95 %. Where nothing is predicted, any may: effects that only add are too rough to tell.

        Args:
            rivals: the measurements whose best it is; None: all. Where none of them fits, whatever can fit beats it.
        """
        if self._expected is None:
            return True
        speeds = self._of_possible(measurements, left, rivals)
        return speeds is not None and float(speeds.chance_above(share).max()) > _AT_MOST

    def surplus(self, measurements: Sequence[Measurement], left: Mask) -> float:
        """By what share of the best any of the pool's configs that are left may be faster than it at the most, at 95 %.

        Below 0 where the best is sure to be, or nothing that is left can be expected to fit; infinity where something
        can and nothing was measured to, and where nothing is predicted.
        """
        if self._expected is None:
            return math.inf
        low, high = -1.0 + 1e-9, 1e3
        speeds = self._of_possible(measurements, left, None)
        if speeds is None:
            return low
        if not math.isfinite(speeds.best):
            return math.inf
        while high - low > _EXACT:
            middle = (low + high) / 2 if high < 1 else math.sqrt((low + 2) * (high + 2)) - 2
            if float(speeds.chance_above(middle).max()) > _AT_MOST:
                low = middle
            else:
                high = middle
        return high

    def _of_possible(
        self, measurements: Sequence[Measurement], left: Mask, rivals: Sequence[Measurement] | None
    ) -> Speeds | None:
        """Of those that are left and can be reckoned with; None: there are none."""
        possible = left & (self.chances(measurements, self.pool) > _HARDLY)
        return self.speeds(measurements, self.pool, rivals).of(possible) if possible.any() else None

    def memory(self, measurements: Sequence[Measurement], group: Group) -> tuple[Array, Array, float]:
        """Expected log bytes of configs, their deviation, and the log of the limit."""
        known = [
            (measurement.config, measurement.peak_bytes.allocated)
            for measurement in measurements
            if measurement.fits and measurement.peak_bytes and measurement.peak_bytes.allocated > 0
        ]
        known += self.past.sizes
        failed = [measurement.config for measurement in measurements if measurement.outcome is Outcome.OUT_OF_MEMORY]
        failed += self.past.outgrew
        limit = self._limit(measurements)
        noise = _GUESSED_MEMORY_NOISE if self._expected is None else _MEMORY_NOISE
        at = self.group([config for config, _ in known])
        sizes = np.log([size for _, size in known]) - at.nbytes
        effects = self._memory_prior(limit).learn(at.rows, sizes, noise)
        if failed:
            # All that is known of these is that they lie past the limit: where they were expected there, nothing new.
            where = self.group(failed)
            past = limit + _BEYOND - where.nbytes
            effects = effects.learn(where.rows, np.maximum(effects.predict(where.rows)[0], past), _BEYOND)
        off, deviation = effects.predict(group.rows)
        return off + group.nbytes, deviation, limit

    def _memory_prior(self, limit: float) -> LinearModel:
        if self._expected is not None:
            mean = np.zeros(self._features.width)
            return LinearModel.prior(mean, intercept=_OFF_MEMORY, slope=_OFF_MEMORY / 4, value=_OFF_MEMORY / 2)
        mean = self._frugality.copy()
        # Before anything fits, the most frugal config is expected to fill the limit: only differences count then.
        mean[0] = limit - self._least
        return LinearModel.prior(mean, slope=_MEMORY_SLOPE_DEVIATION, value=_MEMORY_DEVIATION)

    def _limit(self, measurements: Sequence[Measurement]) -> float:
        if self._memory_bytes:
            return math.log(self._memory_bytes)
        peaks = [
            (measurement.outcome, measurement.peak_bytes.allocated)
            for measurement in measurements
            if measurement.peak_bytes and measurement.peak_bytes.allocated > 0
        ]
        fitted = max((size for outcome, size in peaks if outcome is Outcome.FITS), default=1)
        failed = min((size for outcome, size in peaks if outcome is Outcome.OUT_OF_MEMORY), default=2 * fitted)
        return math.log(max(fitted, failed))

    def works(self, measurements: Sequence[Measurement], group: Group) -> Array:
        """The probability that a config works if it fits: what crashes, hangs or diverges is avoided, not forbidden."""
        tried = [(each.config, each.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY)) for each in measurements]
        tried += self.past.works
        works = [worked for _, worked in tried]
        if all(works):  # the common case, in which the answer is known
            return np.ones(len(group.configs))
        mean = np.zeros(self._features.width)
        mean[0] = 1.0
        prior = LinearModel.prior(mean, intercept=_WORKS_DEVIATION, slope=1e-6, value=_WORKS_DEVIATION)
        rows = self._features.rows([config for config, _ in tried])
        effects = prior.learn(rows, np.array(works, dtype=float), _WORKS_NOISE)
        return np.clip(effects.predict(group.rows)[0], 0.02, 1.0)


def _frugality(values: Mapping[str, tuple[Value, ...]], features: Features, memory_order: MemoryOrder) -> Array:
    """Expected effects on log memory: rising with the order of the space, which proven ranks correct."""
    mean = np.zeros(features.width)
    mean[1] = _MEMORY_SLOPE
    ladders = {knob: _ladder(knob, each, memory_order) for knob, each in values.items() if knob != MICRO_BATCH}
    for column, (knob, value) in enumerate(features.names, start=2):
        if knob in ladders:  # the slope says it of the micro-batch
            mean[column] = _MEMORY_SPAN * ladders[knob].index(value) / max(1, len(ladders[knob]) - 1)
    return mean


def _ladder(knob: str, values: tuple[Value, ...], memory_order: MemoryOrder) -> list[Value]:
    """The values from most frugal to least; the ones that have a proven rank change places among themselves."""
    ladder = list(values)
    ranks = {value: rank for value in values if (rank := memory_order(knob, value)) is not None}
    places = [place for place, value in enumerate(values) if value in ranks]
    for place, value in zip(places, sorted(ranks, key=ranks.__getitem__), strict=True):
        ladder[place] = value
    return ladder
