"""The surrogate: how fast and how large configs are, and whether they work, given the measurements so far. It chooses
what to measure next, says when to stop, and tells noise from speed; it never excludes a config."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autofit.core.config import Config, Value
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.search.beside_tensors import RESERVED_NOISE, beside_tensors
from autofit.search.costs import Costs
from autofit.search.drift import as_now
from autofit.search.encoding import MICRO_BATCH, Encoding, Indices, Mask
from autofit.search.gaussian_process import GaussianProcess, Mixture
from autofit.search.linear_model import Array, Features, LinearModel, normal_below, normal_density
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurements
from autofit.search.pruning import MemoryOrder
from autofit.search.ranking import fastest

# The prior, as natural logarithms with standard deviations. Chosen on synthetic problems like those of the tests, and
# robust: with any one of these halved or doubled, the mean regret after 16 probes of 160 problems stayed between 1 %
# and 3.5 %. The memory slope was picked on those same problems, so the figures flatter it.
_MEMORY_SLOPE, _MEMORY_SLOPE_DEVIATION = 0.3, 0.3  # per doubling of the micro-batch
_MEMORY_SPAN, _MEMORY_DEVIATION = 0.7, 0.25  # from a knob's most frugal value to its least
_SPEED_SLOPE, _SPEED_SLOPE_DEVIATION = 0.3, 0.2  # larger micro-batches fill the device better
_SPEED_DEVIATION = 0.25
_GUESSED_MEMORY_NOISE = 0.03  # of what additive effects cannot express
# With predictions, the linear model is of their errors in memory: 0.012 to 0.035 over the tables recorded on the CPU.
_OFF_MEMORY, _MEMORY_NOISE = 0.03, 0.01
# What these deviations are multiplied by, with prior probabilities: predictions are often exact, as measurements tell.
_MEMORY_SCALES, _SCALES_LIKELY = np.array([0.02, 0.2, 1.0, 3.0]), np.array([0.15, 0.2, 0.5, 0.15])
SPEED_NOISE = 0.04  # between two probes of one config, on machines that others use too
_IMPOSSIBLE = 1e-6  # of any scale: one more config that ran out of memory weighs at most as much
_BEYOND = 0.2  # how far past the limit an out-of-memory is assumed to lie
_WORKS_DEVIATION, _WORKS_NOISE = 0.5, 0.2  # of 1 for a config that works and 0 for one that does not
_INFEASIBLE = 0.05  # a config that is less likely feasible is no reason to go on
# Nor is one below _LIKELY, unless a gain of _WORTH is expected of it, or nothing is predicted.
_LIKELY, _WORTH = 0.5, 0.05
# Predictions that are so many times off prove nothing, unless so many probes are off alike, within this deviation of
# logarithms: operators that were timed while other work disturbed them put configs in a wrong order.
_MISLED, _ENOUGH, _ALIKE = 4.0, 5, 0.25
_CONFIRMED = 1.3  # a quick search believes predictions that are less than so many times off
_CONFIDENCE = 0.05  # a config that is faster with at most this probability is no reason to go on
_PARTS = 10_000  # a bound is told in such parts of 1


@dataclass(frozen=True)
class Speeds:
    """Log steps per second of configs: their posterior, and its highest mean among those measured to fit."""

    posterior: Mixture
    best: float

    def expected_improvement(self) -> Array:
        """Expected improvement over the best (Jones et al. 1998, equation 15); without a best, over each one's mean."""
        means, deviations = self.posterior.means, self.posterior.deviations
        z = (means - self.best) / deviations if math.isfinite(self.best) else np.zeros(means.shape)
        gain = deviations * (z * normal_below(z) + normal_density(z))
        return np.asarray(self.posterior.weights @ gain)

    def of(self, mask: Mask) -> Speeds:
        means, deviations = self.posterior.means[:, mask], self.posterior.deviations[:, mask]
        return replace(self, posterior=replace(self.posterior, means=means, deviations=deviations))

    def probability_above(self, share: float) -> Array:
        """The probability of each to be faster than the best by more than that share of it."""
        z = (self.posterior.means - self.best - math.log1p(share)) / self.posterior.deviations
        return np.asarray(self.posterior.weights @ normal_below(z))


@dataclass(frozen=True)
class Sizes:
    """Log bytes of configs: their posterior, a mixture over scales of its deviations, and the log of the limit."""

    means: Array
    deviations: Array
    scales: Array
    weights: Array
    limit: float
    limit_noise: float  # of each config's own

    def below_limit(self) -> Array:
        """The probability of each config to be below the limit, at each scale: [scales, configs]."""
        deviations = np.hypot(self.scales[:, None] * self.deviations, self.limit_noise)
        return normal_below((self.limit - self.means) / deviations)


@dataclass(frozen=True)
class Group:
    """Configs with their features and predictions; these are logarithms, 0 without any."""

    configs: Sequence[Config]
    rows: Array
    nbytes: Array
    speed: Array


class Surrogate:
    """A model of the configs of a pool, and of others like them.

    Args:
        values: every value each searched knob takes in the space, expected memory rising.
        memory_order: proven ranks of memory, `Technique.memory_order`.
        memory_bytes: what tensors may take; None when unknown, then it is guessed from what fitted and what did not.
        context_bytes: of a card's open context, beside which those lie with what no tensor fills; None on a CPU.
        predictions, prior: of the pool, and earlier searches' measurements, if there are any.
    """

    def __init__(
        self,
        values: Mapping[str, tuple[Value, ...]],
        pool: Sequence[Config],
        *,
        memory_order: MemoryOrder,
        memory_bytes: int | None = None,
        context_bytes: int | None = None,
        predictions: Predictions | None = None,
        prior: PriorMeasurements | None = None,
    ) -> None:
        self.values, self.memory_order = values, memory_order
        self.prior = prior or PriorMeasurements()
        self.informed = predictions is not None or bool(self.prior.fits)
        self._predictions, self._memory_bytes, self._context_bytes = predictions, memory_bytes, context_bytes
        self._memory_noise = _GUESSED_MEMORY_NOISE if predictions is None else _MEMORY_NOISE
        self._cache: dict[str, tuple[Any, Any]] = {}  # of the pool: by name the measurements and the answer
        self._features = Features(values)
        self.pool, self.encoding = self.group(pool), Encoding(pool)
        knobs = [knob for knob, each in values.items() if len(each) > 1]
        self._process = GaussianProcess(knobs, self.encoding)
        self._costs = Costs(self._features)
        self._memory_effects = _memory_effects(values, self._features, memory_order)
        self._least_memory = float(min(self.pool.rows @ self._memory_effects, default=0.0))

    def group(self, configs: Sequence[Config]) -> Group:
        """Configs with what the model needs of them."""
        nbytes = speed = np.zeros(len(configs))
        if self._predictions is not None:
            nbytes, speed = self._predictions.log_bytes(configs), self._predictions.log_throughput(configs)
        return Group(configs, self._features.rows(configs), nbytes, speed)

    def speeds(
        self, measurements: Sequence[Measurement], group: Group, rivals: Sequence[Measurement] | None = None
    ) -> Speeds:
        """The speeds of configs, and the best of the `rivals`: some measurements, None for all."""
        steady = as_now(measurements, noise=SPEED_NOISE)
        timed = [(each.config, each.step_seconds.median) for each in steady if each.fits and each.step_seconds]
        at = self.group([*(config for config, _ in timed), *self.prior.configs])
        values = np.concatenate([-np.log([seconds for _, seconds in timed]), self.prior.speeds])
        configs = {each.config for each in (measurements if rivals is None else rivals)}
        among = [config in configs for config, _ in timed] + [False] * len(self.prior.configs)
        best = float(self._speed(at, values, at).mean[among].max(initial=-math.inf))
        return Speeds(self._cached("speeds", measurements, group, lambda: self._speed(at, values, group)), best)

    def _cached(self, name: str, measurements: Sequence[Measurement], group: Group, compute: Callable[[], Any]) -> Any:
        """Compute once for the whole pool, which is asked for several times before the next measurement."""
        if group is not self.pool:
            return compute()
        key = tuple((each.number, each.config, each.outcome) for each in measurements)
        if name not in self._cache or self._cache[name][0] != key:
            self._cache[name] = key, compute()
        return self._cache[name][1]

    def _speed(self, at: Group, values: Array, group: Group) -> Mixture:
        noise = self.prior.noise(len(values) - len(self.prior.configs), SPEED_NOISE)
        if self._predictions is not None:
            asked = None if group is self.pool else group.configs
            errors = self._process.predict(at.configs, values - at.speed, noise, asked)
            return replace(errors, means=errors.means + group.speed)
        mean = np.zeros(self._features.width)
        mean[1] = _SPEED_SLOPE
        prior = LinearModel.prior(mean, slope=_SPEED_SLOPE_DEVIATION, value=_SPEED_DEVIATION)
        means, deviations = prior.learn(at.rows, values, noise).predict(group.rows)
        return Mixture(np.ones(1), means[None, :], np.maximum(deviations, 1e-9)[None, :])

    def leader(self, measurements: Sequence[Measurement]) -> Measurement | None:
        """The latest measurement of the fitting config with the highest expected speed."""
        best = fastest(self.posterior(measurements))
        return next((each for each in reversed(measurements) if best and each.config == best.config), None)

    def posterior(self, measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
        """The latest measurement of every config that fits, at the step time expected of it given all measurements.
        Without predictions that is the mean of its own: additive effects are too rough to doubt measurements for."""
        latest = {each.config: each for each in measurements if each.fits and each.step_seconds}
        if self._predictions is None:
            times: dict[Config, list[float]] = {}
            for each in as_now(measurements, noise=SPEED_NOISE):
                if each.fits and each.step_seconds:
                    times.setdefault(each.config, []).append(each.step_seconds.median)
            return tuple(each.taking(statistics.geometric_mean(times[config])) for config, each in latest.items())
        means = self.speeds(measurements, self.group(list(latest))).posterior.mean
        return tuple(each.taking(math.exp(-mean)) for each, mean in zip(latest.values(), means.tolist(), strict=True))

    def fantasies(self, measurements: Sequence[Measurement], configs: Sequence[Config]) -> list[Measurement]:
        """The most likely measurements of configs; their numbers are below 0, as no real one's."""
        group = self.group(configs)
        seconds = np.exp(-self.speeds(measurements, group).posterior.mean).tolist()
        sizes = np.exp(self.memory(measurements, group).means).astype(int).tolist()
        fits = (self.probability_feasible(measurements, group) >= 0.5).tolist()
        return [
            Measurement(
                config, Outcome.FITS, -1 - index, StepSeconds(*[seconds[index]] * 3), peak_bytes=PeakBytes(sizes[index])
            )
            if fits[index]
            else Measurement(config, Outcome.OUT_OF_MEMORY, -1 - index)
            for index, config in enumerate(configs)
        ]

    def probability_feasible(self, measurements: Sequence[Measurement], group: Group) -> Array:
        """The probability of configs to fit and to work."""

        def compute() -> Array:
            sizes = self.memory(measurements, group)
            return np.asarray(sizes.weights @ sizes.below_limit() * self.works(measurements, group))

        return np.asarray(self._cached("feasible", measurements, group, compute))

    def cost(self, measurements: Sequence[Measurement], group: Group, indices: Indices | slice = slice(None)) -> Array:
        """The expected seconds of a probe of each config, or of those at some indices."""
        return self._costs.seconds(measurements, group.rows[indices])

    def can_improve(
        self, measurements: Sequence[Measurement], left: Mask, share: float, rivals: Sequence[Measurement] | None = None
    ) -> bool:
        """Whether any config left may, at 95 %, be faster than the best by more than a share of it. Without predictions
        any may, additive effects being too rough to say, and with misleading ones. The best is that of `rivals`, None:
        of all measurements; where none of them fits, any that can fit beats it."""
        if self._predictions is None or self.misled_by(measurements):
            return True
        speeds = self._of_feasible(measurements, left, rivals)
        return speeds is not None and float(speeds.probability_above(share).max()) > _CONFIDENCE

    def expects_faster(self, measurements: Sequence[Measurement], left: Mask, share: float) -> bool:
        """Whether a config left is expected to be faster than the best by more than a share of it; never without
        predictions, which additive effects do not replace."""
        if self._predictions is None:
            return False
        speeds = self._of_feasible(measurements, left, None)
        return speeds is not None and float(speeds.posterior.mean.max()) > speeds.best + math.log1p(share)

    def misled_by(self, measurements: Sequence[Measurement]) -> float:
        """How many times longer than predicted steps take, where that says that predictions mislead; else 0."""
        known = self._times_longer(measurements)
        off = statistics.median(known) if known else 0.0
        alike = len(known) >= _ENOUGH and statistics.pstdev(known) <= _ALIKE
        return 0.0 if abs(off) < math.log(_MISLED) or alike else math.exp(off)

    def confirmed_by(self, measurements: Sequence[Measurement]) -> bool:
        """Whether what was measured to fit takes as long as predicted, about."""
        known = self._times_longer(measurements)
        return bool(known) and max(map(abs, known)) < math.log(_CONFIRMED)

    def _times_longer(self, measurements: Sequence[Measurement]) -> list[float]:
        """Logarithms of how many times longer than predicted the step of each config took that fits."""
        times = {each.config: each.step_seconds.median for each in measurements if each.fits and each.step_seconds}
        seconds = self._predictions.seconds if self._predictions else {}
        return [math.log(took / seconds[config]) for config, took in times.items() if seconds.get(config, 0.0) > 0.0]

    def regret_bound(self, measurements: Sequence[Measurement], left: Mask) -> float:
        """The largest share by which any config left may, at 95 %, be faster than the best. Below 0 where the best is
        surely faster, or no config left is likely feasible; infinity without predictions or with misleading ones, or
        where nothing was measured to fit yet."""
        if self._predictions is None or self.misled_by(measurements):
            return math.inf
        speeds = self._of_feasible(measurements, left, None)
        if speeds is None:
            return -1.0
        if not math.isfinite(speeds.best):
            return math.inf
        shares = range(1 - _PARTS, 1000 * _PARTS)
        enough = bisect.bisect_left(
            shares, -_CONFIDENCE, key=lambda share: -speeds.probability_above(share / _PARTS).max()
        )
        return (shares.start + enough) / _PARTS

    def _of_feasible(
        self, measurements: Sequence[Measurement], left: Mask, rivals: Sequence[Measurement] | None
    ) -> Speeds | None:
        """The speeds of those left that are worth the risk of a probe; None: there are none."""
        worth = self.worth_the_risk(measurements, left, rivals)
        return self.speeds(measurements, self.pool, rivals).of(worth) if worth.any() else None

    def worth_the_risk(
        self, measurements: Sequence[Measurement], left: Mask, rivals: Sequence[Measurement] | None = None
    ) -> Mask:
        """Which of those left are likely feasible, or may bring so much that a probe is worth it though they are not.
        The best is that of `rivals`, as for `can_improve`."""
        feasible = self.probability_feasible(measurements, self.pool)
        possible = left & (feasible > _INFEASIBLE)
        if self._predictions is None or not possible.any():
            return possible
        gain = self.speeds(measurements, self.pool, rivals).expected_improvement() * feasible
        return np.asarray(possible & ((feasible > _LIKELY) | (gain > _WORTH)))

    def memory(self, measurements: Sequence[Measurement], group: Group) -> Sizes:
        """The bytes of configs, given those measured."""
        sizes = [(each.config, size) for each in measurements if each.fits and (size := _allocated(each))]
        sizes += self.prior.sizes
        failed = [each.config for each in measurements if each.outcome is Outcome.OUT_OF_MEMORY]
        failed += self.prior.outgrew
        limit = self._limit(measurements)
        scales, weights = np.ones(1), np.ones(1)
        if self._predictions is not None:
            zero, scales, weights = np.zeros(self._features.width), _MEMORY_SCALES, _SCALES_LIKELY
            model = LinearModel.prior(zero, intercept=_OFF_MEMORY, slope=_OFF_MEMORY / 4, value=_OFF_MEMORY / 2)
        else:
            mean = self._memory_effects.copy()
            # Until something fits, the smallest config is expected to fill the limit: only differences count then.
            mean[0] = limit - self._least_memory
            model = LinearModel.prior(mean, slope=_MEMORY_SLOPE_DEVIATION, value=_MEMORY_DEVIATION)
        at, where = self.group([config for config, _ in sizes]), self.group(failed)
        model = model.learn(at.rows, np.log([size for _, size in sizes]) - at.nbytes, self._memory_noise)
        evidence = np.log(weights) - model.learnt * np.log(scales) - model.surprise / scales**2 / 2

        def of(group: Group) -> Sizes:
            means, deviations = model.predict(group.rows)
            weights = np.exp(evidence - evidence.max())
            spread = np.hypot(deviations, self._memory_noise)
            noise = 0.0 if self._context_bytes is None else RESERVED_NOISE
            return Sizes(means + group.nbytes, spread, scales, weights / weights.sum(), limit, noise)

        if failed:
            evidence = evidence + np.log(np.maximum(1 - of(where).below_limit(), _IMPOSSIBLE)).sum(axis=1)
            # They lie past the limit, nothing more is known: where they were expected there, nothing is learnt.
            past = limit + _BEYOND - where.nbytes
            model = model.learn(where.rows, np.maximum(model.predict(where.rows)[0], past), _BEYOND)
        return of(group)

    def _limit(self, measurements: Sequence[Measurement]) -> float:
        if self._memory_bytes:
            if self._context_bytes is None:
                return math.log(self._memory_bytes)
            usable = self._memory_bytes + self._context_bytes
            return math.log(max(1.0, beside_tensors(measurements, self._context_bytes).left(usable)))
        peaks = [(each.outcome, size) for each in measurements if (size := _allocated(each))]
        fitted = max((size for outcome, size in peaks if outcome is Outcome.FITS), default=1)
        failed = min((size for outcome, size in peaks if outcome is Outcome.OUT_OF_MEMORY), default=2 * fitted)
        return math.log(max(fitted, failed))

    def works(self, measurements: Sequence[Measurement], group: Group) -> Array:
        """The probability that a config which fits works: what may crash, hang or diverge is avoided, not excluded."""
        tried = [(each.config, each.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY)) for each in measurements]
        tried += self.prior.works
        works = [worked for _, worked in tried]
        if all(works):  # the common case
            return np.ones(len(group.configs))
        mean = np.zeros(self._features.width)
        mean[0] = 1.0
        prior = LinearModel.prior(mean, intercept=_WORKS_DEVIATION, slope=1e-6, value=_WORKS_DEVIATION)
        rows = self._features.rows([config for config, _ in tried])
        effects = prior.learn(rows, np.array(works, dtype=float), _WORKS_NOISE)
        return np.clip(effects.predict(group.rows)[0], 0.02, 1.0)


def _allocated(measurement: Measurement) -> int:
    return measurement.peak_bytes.allocated if measurement.peak_bytes else 0


def _memory_effects(values: Mapping[str, tuple[Value, ...]], features: Features, memory_order: MemoryOrder) -> Array:
    """Expected effects on log memory: rising in the order of the space, corrected by proven ranks."""
    mean = np.zeros(features.width)
    mean[1] = _MEMORY_SLOPE
    ladders = {knob: _ladder(knob, each, memory_order) for knob, each in values.items() if knob != MICRO_BATCH}
    for column, (knob, value) in enumerate(features.names, start=2):
        if knob in ladders:  # the slope stands for the micro-batch
            mean[column] = _MEMORY_SPAN * ladders[knob].index(value) / max(1, len(ladders[knob]) - 1)
    return mean


def _ladder(knob: str, values: tuple[Value, ...], memory_order: MemoryOrder) -> list[Value]:
    """The values by rising memory; those with a proven rank are sorted among themselves."""
    ranks = {value: rank for value in values if (rank := memory_order(knob, value)) is not None}
    ranked = iter(sorted(ranks, key=ranks.__getitem__))
    return [next(ranked) if value in ranks else value for value in values]
