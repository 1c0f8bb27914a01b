"""The memory model: how many bytes configs need, and how probably that is below the limit.

Logarithms of bytes are a sum of effects of knobs (`linear_model`). Where memory is predicted, the
effects are those on the errors of the predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.config import Value
from autofit.core.measurement import Measurement, Outcome
from autofit.search.beside_tensors import RESERVED_NOISE, beside_tensors
from autofit.search.encoding import MICRO_BATCH, Configs
from autofit.search.group import Group
from autofit.search.linear_model import Array, Features, LinearModel, normal_below
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurements
from autofit.search.pruning import MemoryOrder
from autofit.search.ranking import Measurements

# Without predictions: the prior, in natural logarithms and their standard deviations. Chosen on
# synthetic problems like those of the tests, together with the prior of speed (`surrogate`), and
# robust: with any one of them halved or doubled, the mean regret after 16 probes of 160 problems
# stayed between 1 % and 3.5 %. The slope was picked on those problems, so the figures flatter it.
_SLOPE = 0.3  # per doubling of the micro-batch
_SLOPE_DEVIATION = 0.3
_SPAN = 0.7  # from a knob's most frugal value to its least
_DEVIATION = 0.25
_GUESSED_NOISE = 0.03  # of what additive effects cannot express

# With predictions: their errors were 0.012 to 0.035 over the tables recorded on the CPU.
_ERROR = 0.03
_NOISE = 0.01
# These deviations are multiplied by one of the scales, of these prior probabilities: predictions
# are often exact, and measurements tell.
_SCALES = np.array([0.02, 0.2, 1.0, 3.0])
_SCALE_PROBABILITIES = np.array([0.15, 0.2, 0.5, 0.15])

_IMPOSSIBLE = 1e-6  # of any scale: one more config out of memory weighs at most as much
_BEYOND = 0.2  # how far past the limit an out-of-memory is assumed to lie


@dataclass(frozen=True)
class Sizes:
    """Log bytes of configs and of the limit.

    The posterior is a mixture of normal distributions with the same means.

    Attributes:
        means: [configs].
        deviations: [configs], of the scale 1.
        scales: what deviations are multiplied by.
        weights: of the scales.
        limit: on what tensors may take.
        limit_noise: the deviation of each config's own limit.
    """

    means: Array
    deviations: Array
    scales: Array
    weights: Array
    limit: float
    limit_noise: float

    def below_limit(self) -> Array:
        """The probability of each config to be below the limit: [scales, configs]."""
        deviations = np.hypot(self.scales[:, None] * self.deviations, self.limit_noise)
        return normal_below((self.limit - self.means) / deviations)


@dataclass(frozen=True)
class MemoryModel:
    """The model of the configs of a pool.

    Until something fits, the smallest config of the pool is expected to. Other attributes are as of
    `Surrogate`.
    """

    features: Features
    pool: Group
    memory_order: MemoryOrder
    predictions: Predictions | None
    prior: PriorMeasurements
    memory_bytes: int | None
    context_bytes: int | None

    def sizes(self, measurements: Measurements, group: Group) -> Sizes:
        """The bytes of configs, given those measured."""
        fitting = []
        nbytes = []
        failed = []
        for measurement in measurements:
            size = _allocated(measurement)
            if measurement.fits and size:
                fitting.append(measurement.config)
                nbytes.append(size)
            elif measurement.outcome is Outcome.OUT_OF_MEMORY:
                failed.append(measurement.config)

        fitting.extend(self.prior.sizes)
        nbytes.extend(self.prior.sizes.values())
        failed.extend(self.prior.outgrew)

        limit = self._limit(measurements)
        if self.predictions is None:
            noise = _GUESSED_NOISE
            scales = np.ones(1)
            evidence = np.zeros(1)
            # Until something fits, the smallest config is expected to fill the limit: then only
            # differences count.
            mean = self._effects.copy()
            mean[0] = limit - self._least
            model = LinearModel.prior(mean, slope=_SLOPE_DEVIATION, value=_DEVIATION)
        else:
            noise = _NOISE
            scales = _SCALES
            evidence = np.log(_SCALE_PROBABILITIES)
            mean = np.zeros(self.features.width)
            model = LinearModel.prior(mean, intercept=_ERROR, slope=_ERROR / 4, value=_ERROR / 2)

        # The scale of the deviations is the likelier the less it is surprised by these sizes.
        at = self._group(fitting)
        model = model.learn(at.rows, np.log(nbytes) - at.nbytes, noise)
        evidence = evidence - model.learnt * np.log(scales) - model.surprise / scales**2 / 2

        def posterior(group: Group) -> Sizes:
            means, deviations = model.predict(group.rows)
            weights = np.exp(evidence - evidence.max())
            return Sizes(
                means=means + group.nbytes,
                deviations=np.hypot(deviations, noise),
                scales=scales,
                weights=weights / weights.sum(),
                limit=limit,
                limit_noise=0.0 if self.context_bytes is None else RESERVED_NOISE,
            )

        if failed:
            at = self._group(failed)
            above_limit = np.maximum(1 - posterior(at).below_limit(), _IMPOSSIBLE)
            evidence = evidence + np.log(above_limit).sum(axis=1)

            # They lie past the limit, and nothing more is known: from a config that was expected
            # there, nothing is learnt.
            past = limit + _BEYOND - at.nbytes
            expected, _ = model.predict(at.rows)
            model = model.learn(at.rows, np.maximum(expected, past), _BEYOND)

        return posterior(group)

    def _group(self, configs: Configs) -> Group:
        return Group.of(configs, self.features, self.predictions)

    def _limit(self, measurements: Measurements) -> float:
        """The logarithm of the bytes that tensors may take."""
        if self.memory_bytes:
            if self.context_bytes is None:
                return math.log(self.memory_bytes)
            beside = beside_tensors(measurements, self.context_bytes)
            return math.log(max(1.0, beside.left(self.memory_bytes + self.context_bytes)))

        # Unknown: between the largest that fitted and the smallest that did not.
        fitted = 1
        failed = []
        for measurement in measurements:
            size = _allocated(measurement)
            if measurement.fits:
                fitted = max(fitted, size)
            elif measurement.outcome is Outcome.OUT_OF_MEMORY and size:
                failed.append(size)

        return math.log(max(fitted, min(failed, default=2 * fitted)))

    @cached_property
    def _effects(self) -> Array:
        """Expected effects on log memory: rising in the order of the space, but by proven ranks."""
        mean = np.zeros(self.features.width)
        mean[1] = _SLOPE
        for column, (knob, value) in enumerate(self.features.names, start=2):
            if knob != MICRO_BATCH:  # the slope stands for it
                ladder = _ladder(knob, self.features.values[knob], self.memory_order)
                mean[column] = _SPAN * ladder.index(value) / max(1, len(ladder) - 1)

        return mean

    @cached_property
    def _least(self) -> float:
        """The least expected log memory of the pool."""
        return float(min(self.pool.rows @ self._effects, default=0.0))


def _allocated(measurement: Measurement) -> int:
    """Peak bytes of tensors, 0 where unknown."""
    return measurement.peak_bytes.allocated if measurement.peak_bytes else 0


def _ladder(
    knob: str,
    values: Sequence[Value],
    memory_order: MemoryOrder,
) -> list[Value]:
    """The values by rising memory; those with a proven rank are sorted among themselves."""
    ranks = {}
    for value in values:
        rank = memory_order(knob, value)
        if rank is not None:
            ranks[value] = rank

    ranked = iter(sorted(ranks, key=ranks.__getitem__))
    return [next(ranked) if value in ranks else value for value in values]
