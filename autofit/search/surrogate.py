"""The surrogate: how fast and how large configs are, and whether they work, given the measurements.

It says what a measurement would gain and when to stop, and tells noise from speed; it never
excludes a config.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.result import of_tier, tier
from autofit.search.costs import Costs, cheapest
from autofit.search.drift import as_now, step_times
from autofit.search.encoding import Configs, Encoding, KnobValues, Mask
from autofit.search.gaussian_process import GaussianProcess, Mixture
from autofit.search.group import Group
from autofit.search.linear_model import Array, Features, LinearModel, normal_below, normal_density
from autofit.search.memory_model import MemoryModel
from autofit.search.objectives import Objective
from autofit.search.objectives.discounted import RAW_SPEED
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurements
from autofit.search.pruning import MemoryOrder, ruled_out
from autofit.search.ranking import Measurements, fastest

SPEED_NOISE = 0.04  # between two probes of one config, on machines that others use too

# The prior of log speed without predictions, chosen with that of `memory_model`.
_SLOPE = 0.3  # larger micro-batches fill the device better
_SLOPE_DEVIATION = 0.2
_DEVIATION = 0.25

# A config works: 1; it does not: 0.
_WORKING = (Outcome.FITS, Outcome.OUT_OF_MEMORY)
_WORKS_DEVIATION = 0.5
_WORKS_NOISE = 0.2

_INFEASIBLE = 0.05  # a config that is less likely feasible is no reason to go on
# Nor is one less likely feasible than this, unless a gain of _WORTH is expected of it.
_LIKELY = 0.5
_WORTH = 0.05

# Predictions that are so many times off prove nothing, because operators that were timed while
# other work disturbed them put configs in a wrong order. They do where at least _ENOUGH probes are
# off by the same factor, within a deviation of logarithms.
_BIASED = 4.0
_ENOUGH = 5
_SAME_FACTOR = 0.25
_CONFIRMED = 1.3  # a quick search believes predictions that are less than so many times off

# In logarithms: a probe that took so much longer than the others, as predicted, may be disturbed.
_SLOWER = 3 * SPEED_NOISE
_DEAR = 2.0  # times the median probe: it is not measured again on suspicion
_CONFIDENCE = 0.05  # a config that is faster with at most this probability is no reason to go on
_RESOLUTION = 10_000  # of a regret bound: the parts of 1


@dataclass(frozen=True)
class Merits:
    """Log steps per second of configs, discounted as the objective says.

    Attributes:
        posterior: given all measurements.
        best: its highest mean among configs measured to fit; minus infinity where none is.
    """

    posterior: Mixture
    best: float

    def expected_improvement(self) -> Array:
        """Expected improvement over the best (Jones et al. 1998, equation 15), or over each
        config's own mean where there is no best."""
        means = self.posterior.means
        deviations = self.posterior.deviations
        z = np.zeros(means.shape)
        if math.isfinite(self.best):
            z = (means - self.best) / deviations

        gain = deviations * (z * normal_below(z) + normal_density(z))
        return np.asarray(self.posterior.weights @ gain)

    def of(self, mask: Mask) -> Merits:
        """Those of some of the configs."""
        means = self.posterior.means[:, mask]
        deviations = self.posterior.deviations[:, mask]
        return replace(self, posterior=Mixture(self.posterior.weights, means, deviations))

    def probability_above(self, share: float) -> Array:
        """The probability of each config to be faster than the best by more than a share of it."""
        z = (self.posterior.means - self.best - math.log1p(share)) / self.posterior.deviations
        return np.asarray(self.posterior.weights @ normal_below(z))


class Surrogate:
    """A model of the configs of a pool, and of others like them.

    In its methods `left` are configs of the pool that may still be measured, and `rivals` the
    measurements whose best is to be beaten: None for all.

    Args:
        values: every value each searched knob takes in the space, expected memory rising.
        memory_order: proven ranks of memory, `Technique.memory_order`.
        memory_bytes: what tensors may take; guessed from what fitted and what did not where it is
            None.
        context_bytes: of a card's open context, which takes memory beside tensors, as does what
            its allocator reserves; None on a CPU.
        predictions: of the pool, if there are any.
        prior: earlier searches' measurements, if there are any.
        objective: what the search makes large.
    """

    def __init__(
        self,
        values: KnobValues,
        pool: Configs,
        *,
        memory_order: MemoryOrder,
        memory_bytes: int | None = None,
        context_bytes: int | None = None,
        predictions: Predictions | None = None,
        prior: PriorMeasurements | None = None,
        objective: Objective = RAW_SPEED,
    ) -> None:
        self.values = values
        self.objective = objective
        self.memory_order = memory_order
        self.prior = prior or PriorMeasurements()
        self.predicts = predictions is not None
        self.informed = self.predicts or bool(self.prior.fits)
        self._predictions = predictions
        self._features = Features(values)
        self.pool = self.group(pool)
        self.encoding = Encoding(pool)
        self.memory = MemoryModel(
            self._features,
            self.pool,
            memory_order,
            predictions,
            self.prior,
            memory_bytes,
            context_bytes,
        )

        searched = [knob for knob, choices in values.items() if len(choices) > 1]
        self._process = GaussianProcess(searched, self.encoding)
        self._costs = Costs(self._features)
        # Of the pool, by name: the measurements it was computed from, and the answer.
        self._cache: dict[str, tuple[Any, Any]] = {}

    def group(self, configs: Configs) -> Group:
        """Configs with what the model needs of them."""
        return Group.of(configs, self._features, self._predictions, self.objective)

    def speeds(self, measurements: Measurements, group: Group) -> Mixture:
        """The log steps per second of configs, not discounted."""
        at, values = self._timed(measurements)

        def compute() -> Mixture:
            return self._speed(at, values, group)

        posterior: Mixture = self._cached("speeds", measurements, group, compute)
        return posterior

    def merits(
        self,
        measurements: Measurements,
        group: Group,
        rivals: Measurements | None = None,
    ) -> Merits:
        """What the objective expects of configs, and the best of the rivals by it."""
        posterior = self.speeds(measurements, group)
        discounted = replace(posterior, means=posterior.means - group.discount)

        if rivals is None:
            rivals = measurements
        at, values = self._timed(measurements)
        to_beat = {rival.config for rival in rivals}
        measured = at.configs[: len(values) - len(self.prior.configs)]
        among = [index for index, config in enumerate(measured) if config in to_beat]
        known = self._speed(at, values, at).mean - at.discount
        return Merits(discounted, float(known[among].max(initial=-math.inf)))

    def _timed(self, measurements: Measurements) -> tuple[Group, Array]:
        """The configs that were timed, today's first, and their log steps per second."""
        configs, seconds = step_times(as_now(measurements, noise=SPEED_NOISE))
        at = self.group([*configs, *self.prior.configs])
        return at, np.concatenate([-np.log(seconds), self.prior.speeds])

    def _cached(
        self,
        name: str,
        measurements: Measurements,
        group: Group,
        compute: Callable[[], Any],
    ) -> Any:
        """Compute once for the whole pool, which is asked for several times between probes."""
        if group is not self.pool:
            return compute()

        key = [(seen.number, seen.config, seen.outcome) for seen in measurements]
        if name not in self._cache or self._cache[name][0] != key:
            self._cache[name] = key, compute()
        return self._cache[name][1]

    def _speed(self, at: Group, values: Array, group: Group) -> Mixture:
        """The posterior of log speeds of a group.

        Args:
            at: configs whose speeds are known, today's first.
            values: those, as logarithms of steps per second.
        """
        noise = self.prior.noise(len(values) - len(self.prior.configs), SPEED_NOISE)
        if self._predictions is not None:
            errors = values - at.speed
            configs = None if group is self.pool else group.configs
            posterior = self._process.predict(at.configs, errors, noise, configs)
            return replace(posterior, means=posterior.means + group.speed)

        mean = np.zeros(self._features.width)
        mean[1] = _SLOPE
        model = LinearModel.prior(mean, slope=_SLOPE_DEVIATION, value=_DEVIATION)
        model = model.learn(at.rows, values, noise)
        means, deviations = model.predict(group.rows)
        deviations = np.maximum(deviations, 1e-9)
        return Mixture(np.ones(1), means[None, :], deviations[None, :])

    def leader(self, measurements: Measurements) -> Measurement | None:
        """The latest measurement of the fitting config that is expected to be best."""
        best = fastest(self.posterior(measurements), self.objective)
        if best is None:
            return None
        return next(seen for seen in reversed(measurements) if seen.config == best.config)

    def posterior(self, measurements: Measurements) -> tuple[Measurement, ...]:
        """The latest measurement of every config that fits, at the step time expected of it given
        all measurements.

        Without predictions that is the mean of the config's own times: additive effects are too
        rough to doubt measurements for.
        """
        latest = {seen.config: seen for seen in measurements if seen.fits and seen.step_seconds}
        if self._predictions is not None:
            speeds = self.speeds(measurements, self.group(list(latest)))
            logarithms = -speeds.mean
            expected = map(math.exp, logarithms.tolist())
            return tuple(map(Measurement.taking, latest.values(), expected))

        times: dict[Config, list[float]] = {config: [] for config in latest}
        steady = as_now(measurements, noise=SPEED_NOISE)
        for config, seconds in zip(*step_times(steady), strict=True):
            times[config].append(seconds)

        expected = map(statistics.geometric_mean, times.values())
        return tuple(map(Measurement.taking, latest.values(), expected))

    def fantasies(self, measurements: Measurements, configs: Configs) -> list[Measurement]:
        """The most likely measurements of configs; their numbers are below 0, unlike real ones."""
        group = self.group(configs)
        speeds = self.speeds(measurements, group)
        sizes = self.memory.sizes(measurements, group)
        feasible = self.probability_feasible(measurements, group)

        seconds = np.exp(-speeds.mean).tolist()
        nbytes = np.exp(sizes.means).tolist()
        fantasies = []
        for index, config in enumerate(configs):
            number = -1 - index
            if feasible[index] < 0.5:
                fantasies.append(Measurement(config, Outcome.OUT_OF_MEMORY, number))
                continue

            steps = StepSeconds(seconds[index], seconds[index], seconds[index])
            peak = PeakBytes(int(nbytes[index]))
            fantasy = Measurement(
                config,
                Outcome.FITS,
                number,
                steps,
                peak_bytes=peak,
            )
            fantasies.append(fantasy)

        return fantasies

    def probability_feasible(self, measurements: Measurements, group: Group) -> Array:
        """The probability of configs to fit and to work."""

        def compute() -> Array:
            sizes = self.memory.sizes(measurements, group)
            fits = sizes.weights @ sizes.below_limit()
            return np.asarray(fits * self.works(measurements, group))

        return np.asarray(self._cached("feasible", measurements, group, compute))

    def works(self, measurements: Measurements, group: Group) -> Array:
        """The probability that a config which fits works.

        One that may crash, hang or diverge is avoided, not excluded.
        """
        configs = []
        works = []
        for measurement in measurements:
            configs.append(measurement.config)
            works.append(measurement.outcome in _WORKING)

        configs.extend(self.prior.works)
        works.extend(self.prior.works.values())
        if all(works):  # the common case
            return np.ones(len(group.configs))

        mean = np.zeros(self._features.width)
        mean[0] = 1.0
        deviation = _WORKS_DEVIATION
        model = LinearModel.prior(mean, intercept=deviation, slope=1e-6, value=deviation)
        values = np.array(works, dtype=float)
        model = model.learn(self._features.rows(configs), values, _WORKS_NOISE)
        probabilities, _ = model.predict(group.rows)
        return np.clip(probabilities, 0.02, 1.0)

    def cost(self, measurements: Measurements) -> Array:
        """The expected seconds of a probe of each config of the pool."""
        return self._costs.seconds(measurements, self.pool.rows)

    def ruled_out_by(self, failed: Config) -> Mask:
        """Which configs of the pool need at least the memory of one that ran out of it."""
        return ruled_out(failed, self.encoding, self.memory_order)

    def can_improve(
        self,
        measurements: Measurements,
        left: Mask,
        share: float,
        rivals: Measurements | None = None,
    ) -> bool:
        """Whether any config left may, at 95 %, be faster than the best by more than a share of it.

        Any may without predictions, since additive effects are too rough to say, and where
        predictions are biased. Any that can fit beats rivals of which none fits.
        """
        if self._predictions is None or self.prediction_bias(measurements):
            return True

        merits = self._candidate_merits(measurements, left, rivals)
        if merits is None:
            return False
        return float(merits.probability_above(share).max()) > _CONFIDENCE

    def expects_better(
        self,
        measurements: Measurements,
        left: Mask,
        share: float,
    ) -> bool:
        """Whether a config left is expected to be better than the best by more than a share of it.

        Never without predictions, which additive effects do not replace.
        """
        if self._predictions is None:
            return False

        merits = self._candidate_merits(measurements, left, None)
        if merits is None:
            return False
        return float(merits.posterior.mean.max()) > merits.best + math.log1p(share)

    def doubtful(self, measurements: Measurements, share: float) -> Config | None:
        """A config whose one probe took much longer than all other measurements make likely.

        Only one that they expect to beat the best of its tier by more than a share of it, and whose
        probe was not dear: something else may have disturbed it.
        """
        at, values = self._timed(measurements)
        if self._predictions is None or not len(values):
            return None

        slower = np.median(values - at.speed) - (values - at.speed)
        dear = _DEAR * statistics.median(seen.seconds for seen in measurements)
        counts = Counter(at.configs)
        for measurement in measurements:
            config = measurement.config
            if counts[config] != 1 or measurement.seconds > dear:
                continue
            index = at.configs.index(config)
            if slower[index] < _SLOWER:
                continue

            others = [seen for seen in measurements if seen.config != config]
            rivals = of_tier(tier(config), others)
            merits = self.merits(others, self.group([config]), rivals)
            deviations = np.hypot(merits.posterior.deviations, SPEED_NOISE)
            z = (values[index] - at.discount[index] - merits.posterior.means) / deviations
            is_unlikely = (merits.posterior.weights @ normal_below(z)).item() < _CONFIDENCE
            if is_unlikely and merits.posterior.mean[0] > merits.best + math.log1p(share):
                return config

        return None

    def expected_gain(
        self,
        measurements: Measurements,
        left: Mask,
        rivals: Measurements,
    ) -> float:
        """The largest improvement that is expected of any config left, as a share of the best.

        What is expected of a probe that costs so many times the cheapest counts by as much less.
        Infinity where nothing can be said, or none of the rivals fits.
        """
        if self._predictions is None or self.prediction_bias(measurements):
            return math.inf

        candidates = self.probe_candidates(measurements, left, rivals)
        if not candidates.any():
            return 0.0

        merits = self.merits(measurements, self.pool, rivals)
        if not math.isfinite(merits.best):
            return math.inf
        feasible = self.probability_feasible(measurements, self.pool)
        gain = merits.of(candidates).expected_improvement() * feasible[candidates]

        cost = self.cost(measurements)[candidates]
        dearness = np.maximum(1.0, cost / cheapest(measurements))
        return math.expm1(float((gain / dearness).max()))

    def prediction_bias(self, measurements: Measurements) -> float:
        """How many times longer than predicted steps take; 0 where predictions do not mislead."""
        errors = self._prediction_errors(measurements)
        if not errors:
            return 0.0

        error = statistics.median(errors)
        consistent = len(errors) >= _ENOUGH and statistics.pstdev(errors) <= _SAME_FACTOR
        if consistent or abs(error) < math.log(_BIASED):
            return 0.0
        return math.exp(error)

    def confirmed_by(self, measurements: Measurements) -> bool:
        """Whether what was measured to fit takes about as long as predicted."""
        errors = self._prediction_errors(measurements)
        return bool(errors) and max(map(abs, errors)) < math.log(_CONFIRMED)

    def _prediction_errors(self, measurements: Measurements) -> list[float]:
        """Logarithms of how many times longer than predicted the step of each config took."""
        if self._predictions is None:
            return []

        errors = []
        latest = dict(zip(*step_times(measurements), strict=True))
        for config, seconds in latest.items():
            expected = self._predictions.seconds.get(config, 0.0)
            if expected > 0.0:
                errors.append(math.log(seconds / expected))

        return errors

    def regret_bound(self, measurements: Measurements, left: Mask) -> float:
        """The largest share by which any config left may, at 95 %, be faster than the best.

        Below 0 where the best is surely faster, or no config left is likely feasible; infinity
        without predictions, with biased ones, or where nothing was measured to fit yet.
        """
        if self._predictions is None or self.prediction_bias(measurements):
            return math.inf

        merits = self._candidate_merits(measurements, left, None)
        if merits is None:
            return -1.0
        if not math.isfinite(merits.best):
            return math.inf

        def confidence(part: int) -> float:
            return -float(merits.probability_above(part / _RESOLUTION).max())

        parts = range(1 - _RESOLUTION, 1000 * _RESOLUTION)
        smallest = bisect.bisect_left(parts, -_CONFIDENCE, key=confidence)
        return (parts.start + smallest) / _RESOLUTION

    def _candidate_merits(
        self,
        measurements: Measurements,
        left: Mask,
        rivals: Measurements | None,
    ) -> Merits | None:
        """What is expected of those left that are worth a probe; None where none is."""
        candidates = self.probe_candidates(measurements, left, rivals)
        if not candidates.any():
            return None
        return self.merits(measurements, self.pool, rivals).of(candidates)

    def probe_candidates(
        self,
        measurements: Measurements,
        left: Mask,
        rivals: Measurements | None = None,
    ) -> Mask:
        """Which of those left are worth a probe.

        They are likely feasible, or would gain so much that a probe is worth its risk.
        """
        feasible = self.probability_feasible(measurements, self.pool)
        possible = left & (feasible > _INFEASIBLE)
        if self._predictions is None or not possible.any():
            return possible

        merits = self.merits(measurements, self.pool, rivals)
        gain = merits.expected_improvement() * feasible
        return np.asarray(possible & ((feasible > _LIKELY) | (gain > _WORTH)))
