"""EffectsSampler: chooses the next Config to measure, behind Optuna's ordinary sampler interface.

Two phases. Until something fits, the fastest of those that are expected to fit, where predictions say which those are,
and least memory first where they do not: an answer early beats a good one late. From then on the config with the
largest expected improvement of throughput, times the probability that it fits, times the probability that it works at
all. What an out-of-memory proves not to fit, what is refused and what is measured already is never proposed.

It learns from the study's trials only (the user attribute `measurement`), so a resumed study goes on as if never
stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autofit.core.config import Config, Value
from autofit.core.measurement import Measurement, Outcome
from autofit.search.dominance import MemoryOrder, rules_out
from autofit.search.effects import MICRO_BATCH, Array, Effects, Features, normal_below, normal_density
from autofit.search.expectation import Expectation

MEASUREMENT = "measurement"  # the user attribute of a trial that holds Measurement.to_trial()

# What is expected before any probe, as natural logarithms, each with how sure that is. Chosen on synthetic problems
# like those of the tests, and not delicate: with any one of these halved or doubled (the last line was not tried so),
# the mean regret after 16 probes of 160 problems stayed between 1 % and 3.5 %. The memory slope was picked on those
# same problems, so the figures flatter it.
_MEMORY_SLOPE, _MEMORY_SLOPE_DEVIATION = 0.3, 0.3  # per doubling of the micro-batch
_MEMORY_SPAN, _MEMORY_DEVIATION = 0.7, 0.25  # from a knob's most frugal value to its least
_SPEED_SLOPE, _SPEED_SLOPE_DEVIATION = 0.3, 0.2  # larger micro-batches fill the device better
_SPEED_DEVIATION = 0.25
# Where there are predictions, effects are of what these are off by.
_OFF_MEMORY, _OFF_SPEED = 0.08, 0.15
_MEMORY_NOISE, _SPEED_NOISE = 0.03, 0.03  # of measurements, and of what effects that only add cannot express
_BEYOND = 0.2  # how far past the limit an out-of-memory is taken to lie; it says only that it lies past it
_LIKELY = 0.7  # to fit: enough for the first probes, of which one that fits tells more than one that does not
_WORKS_DEVIATION, _WORKS_NOISE = 0.5, 0.2  # of 1 for a config that works and 0 for one that does not


class EffectsSampler(BaseSampler):
    """Proposes configs of a pool by what the measurements so far say about the effect of each knob.

    Args:
        values: every value each searched knob takes in the space, expected memory rising.
        pool: the canonical configs that may be proposed (the refused ones already left out).
        memory_order: proven ranks of memory, `Technique.memory_order`.
        memory_bytes: what tensors may take; None when unknown, then it is guessed from what fitted and what did not.
        expected: what is predicted of the pool; None where nothing is.
        seed: decides between configs that promise the same.
    """

    def __init__(
        self,
        values: Mapping[str, tuple[Value, ...]],
        pool: Sequence[Config],
        *,
        memory_order: MemoryOrder,
        memory_bytes: int | None = None,
        expected: Expectation | None = None,
        seed: int = 0,
    ) -> None:
        self._expected = expected
        self.distributions: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(each) for knob, each in values.items()
        }
        self._open = dict.fromkeys(pool)  # not yet ruled out; measured ones may be among them
        self._ruled_by: set[Config] = set()
        self._by_params = {Config(self._params(config)): config for config in pool}
        self._memory_order = memory_order
        self._memory_bytes = memory_bytes
        self._seed = seed
        self._features = Features(values)
        self._rows = self._features.rows(pool)
        self._row_of = {config: place for place, config in enumerate(pool)}
        self._frugality = _frugality(values, self._features, memory_order)
        self._least = float(min(self._rows @ self._frugality, default=0.0))

    def candidates(self, measurements: Sequence[Measurement]) -> list[Config]:
        """The configs that are neither measured nor proven not to fit, in the order of the pool."""
        self._rule_out(measurements)
        measured = {measurement.config for measurement in measurements}
        return [config for config in self._open if config not in measured]

    def config(self, params: Mapping[str, Any]) -> Config:
        """The canonical Config of a trial's params."""
        return self._by_params[Config({knob: params[knob] for knob in self.distributions})]

    def choose(self, measurements: Sequence[Measurement]) -> Config:
        """The config to measure next.

        Raises:
            LookupError: there is none left.
        """
        candidates = self.candidates(measurements)
        if not candidates:
            raise LookupError("every config of the space is measured, refused or proven not to fit")
        rows = self._rows[[self._row_of[config] for config in candidates]]
        works = self._works(measurements, rows)
        memory, memory_deviation, limit = self._memory(measurements, candidates, rows)
        fits = normal_below((limit - memory) / np.hypot(memory_deviation, _MEMORY_NOISE))
        if not any(measurement.fits for measurement in measurements):
            likely = fits * works > _LIKELY
            if self._expected is None or not likely.any():
                return candidates[int(np.argmin(memory - np.log(works)))]
            return candidates[int(np.argmax(np.where(likely, self._expected.log_throughput(candidates), -math.inf)))]
        score = self._improvement(measurements, candidates, rows) * fits * works
        ties = np.random.default_rng((self._seed % 2**32, len(measurements))).random(len(score))
        return candidates[int(np.lexsort((ties, score))[-1])]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Optuna asks which parameters are chosen together: all knobs."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Optuna asks for all knobs of the next trial."""
        return self._params(self.choose(measurements_of(study)))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Optuna asks for a parameter that is no knob; there is none."""
        raise LookupError(f"{param_name} is not a knob of the space this sampler was made for")

    def _params(self, config: Config) -> dict[str, Value]:
        return {knob: config[knob] for knob in self.distributions}

    def _rule_out(self, measurements: Sequence[Measurement]) -> None:
        for measurement in measurements:
            failed = measurement.config
            if measurement.outcome is not Outcome.OUT_OF_MEMORY or failed in self._ruled_by:
                continue
            self._ruled_by.add(failed)
            for config in [each for each in self._open if rules_out(failed, each, self._memory_order)]:
                del self._open[config]

    def _improvement(self, measurements: Sequence[Measurement], configs: Sequence[Config], rows: Array) -> Array:
        """Expected improvement of log throughput over the fastest so far (Jones et al. 1998, equation 15)."""
        timed = [measurement for measurement in measurements if measurement.fits and measurement.throughput > 0]
        values = np.log([measurement.throughput for measurement in timed])
        mean = np.zeros(self._features.width)
        if self._expected is None:
            mean[1] = _SPEED_SLOPE
            prior = Effects.prior(mean, slope=_SPEED_SLOPE_DEVIATION, value=_SPEED_DEVIATION)
            known, predicted = np.zeros(len(timed)), np.zeros(len(rows))
        else:
            prior = Effects.prior(mean, slope=_OFF_SPEED / 2, value=_OFF_SPEED)
            known = self._expected.log_throughput([measurement.config for measurement in timed])
            predicted = self._expected.log_throughput(configs)
        off, deviation = prior.learn(self._rows_of(timed), values - known, _SPEED_NOISE).predict(rows)
        expected = predicted + off
        deviation = np.maximum(deviation, 1e-9)
        z = (expected - values.max(initial=-math.inf)) / deviation if timed else np.zeros(len(rows))
        return deviation * (z * normal_below(z) + normal_density(z))

    def _memory(
        self, measurements: Sequence[Measurement], configs: Sequence[Config], rows: Array
    ) -> tuple[Array, Array, float]:
        """Expected log bytes of the rows, their deviation, and the log of the limit."""
        known = [
            (measurement, measurement.peak_bytes.allocated)
            for measurement in measurements
            if measurement.fits and measurement.peak_bytes and measurement.peak_bytes.allocated > 0
        ]
        failed = [measurement for measurement in measurements if measurement.outcome is Outcome.OUT_OF_MEMORY]
        limit = self._limit(measurements)
        effects = self._memory_prior(limit)
        at = [measurement for measurement, _ in known]
        sizes = np.log([size for _, size in known]) - self._predicted_bytes(at)
        effects = effects.learn(self._rows_of(at), sizes, _MEMORY_NOISE)
        if failed:
            # All that is known of these is that they lie past the limit: where they were expected there, nothing new.
            where, past = self._rows_of(failed), limit + _BEYOND - self._predicted_bytes(failed)
            effects = effects.learn(where, np.maximum(effects.predict(where)[0], past), _BEYOND)
        off, deviation = effects.predict(rows)
        predicted = 0.0 if self._expected is None else self._expected.log_bytes(configs)
        return off + predicted, deviation, limit

    def _memory_prior(self, limit: float) -> Effects:
        if self._expected is not None:
            mean = np.zeros(self._features.width)
            return Effects.prior(mean, intercept=_OFF_MEMORY, slope=_OFF_MEMORY / 4, value=_OFF_MEMORY / 2)
        mean = self._frugality.copy()
        # Before anything fits, the most frugal config is expected to fill the limit: only differences count then.
        mean[0] = limit - self._least
        return Effects.prior(mean, slope=_MEMORY_SLOPE_DEVIATION, value=_MEMORY_DEVIATION)

    def _predicted_bytes(self, measurements: Sequence[Measurement]) -> Array:
        if self._expected is None:
            return np.zeros(len(measurements))
        return self._expected.log_bytes([measurement.config for measurement in measurements])

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

    def _works(self, measurements: Sequence[Measurement], rows: Array) -> Array:
        """The probability that a config works if it fits: what crashes, hangs or diverges is avoided, not forbidden."""
        mean = np.zeros(self._features.width)
        mean[0] = 1.0
        prior = Effects.prior(mean, intercept=_WORKS_DEVIATION, slope=1e-6, value=_WORKS_DEVIATION)
        works = [measurement.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY) for measurement in measurements]
        effects = prior.learn(self._rows_of(measurements), np.array(works, dtype=float), _WORKS_NOISE)
        return np.clip(effects.predict(rows)[0], 0.02, 1.0)

    def _rows_of(self, measurements: Sequence[Measurement]) -> Array:
        return self._features.rows([measurement.config for measurement in measurements])


def measurements_of(study: Study) -> list[Measurement]:
    """The measurements that a study's trials hold, by number."""
    held = [
        Measurement.from_trial(trial.user_attrs[MEASUREMENT])
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.RUNNING and MEASUREMENT in trial.user_attrs
    ]
    return sorted(held, key=lambda measurement: measurement.number)


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
