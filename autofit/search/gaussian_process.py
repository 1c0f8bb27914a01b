"""The Gaussian process: errors of predicted speeds, config by config, learnt from measurements.

It models the logarithm of measured / predicted (Rasmussen and Williams, "Gaussian Processes for
Machine Learning", algorithm 2.1). Configs are the more alike the fewer knobs they differ in, so a
knob's error may depend on the others. The error that all share is learnt from the first probe.
Values of some knobs have an error of their own: errors of one kernel do not generalize to others.
The scale of the errors on this device is learnt too: a mixture of several scales, weighted by their
evidence.

Chosen over additive effects on four recorded tables (benchmarks/searches/tables): for 3, 6, 12 and
24 measured configs its predictions of the others were nearer in each, and its uncertainty was right
more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.search.encoding import MICRO_BATCH, Codes, Configs, Encoding, doublings
from autofit.search.linear_model import Array

# Standard deviations of errors with their prior probabilities: recorded tables had 0.09 to 0.14. On
# a device that was never measured, and for techniques whose cost is assumed, they may be a few
# times larger.
_SCALES = np.array([0.06, 0.13, 0.26, 0.52])
_SCALE_PROBABILITIES = np.array([0.15, 0.55, 0.2, 0.1])

# Correlation of two configs: a factor for each knob that differs, and for each doubling of the
# micro-batch. For the first, 0.5 to 0.8 did as well within a few per cent.
_PER_KNOB = 0.75
_PER_DOUBLING = 0.85

# Standard deviation of the error that all configs share: tables had 0.3; more would hide that the
# first probe was chosen too well.
_COMMON = 0.4
# That of the error that all configs with a value of a knob share, where it decides whose kernels a
# whole model runs. On an H200 steps in int8 took 1.8 times as long as predicted, those in 4 bits
# 1.15 times: without this, a search measured int8 ten times and never 4 bits, which were predicted
# 9 % slower. The same for compilation found no better configs, and took longer.
_OF_VALUE = {"quantization": 0.2}


@dataclass(frozen=True)
class Mixture:
    """A mixture of normal distributions for each config.

    Attributes:
        weights: [scales].
        means: [scales, configs].
        deviations: [scales, configs].
    """

    weights: Array
    means: Array
    deviations: Array

    @property
    def mean(self) -> Array:
        """The mean of the whole mixture: [configs]."""
        return np.asarray(self.weights @ self.means)


class GaussianProcess:
    """The process over the configs of a pool.

    Args:
        knobs: those in which the configs may differ; the micro-batch counts by its doublings.
        pool: the configs that are predicted again and again.
    """

    def __init__(self, knobs: Sequence[str], pool: Encoding) -> None:
        self._pool = pool
        self._columns: list[int] = []
        deviations = []
        for column, knob in enumerate(pool.knobs):
            if knob in knobs and knob != MICRO_BATCH:
                self._columns.append(column)
                deviations.append(_OF_VALUE.get(knob, 0.0))

        self._of_value = np.array(deviations) ** 2
        self._all = _Points(pool.codes[:, self._columns], pool.doublings)
        # Of each measured config with all of the pool: correlations, and covariances that do not
        # depend on the scale.
        self._with_all: dict[Config, tuple[Array, Array]] = {}

    def predict(
        self,
        measured: Configs,
        values: Array,
        noise: Array,
        at: Configs | None = None,
    ) -> Mixture:
        """The posterior at some configs, given measured ones.

        The systems of all scales are solved through one decomposition, as there may be tens of
        thousands of configs: with N the covariance that does not depend on the scale s, and A the
        correlations of the measured configs, N^-1/2 A N^-T/2 = Q L Q^T, so that
        (s^2 A + N)^-1 = N^-T/2 Q (s^2 L + 1)^-1 Q^T N^-1/2.

        Args:
            values: logarithms of measured / predicted speed.
            noise: the covariance of their errors.
            at: None: all of the pool.
        """
        if not len(values):
            count = len(self._pool.codes if at is None else at)
            means = np.zeros((len(_SCALES), count))
            return Mixture(_SCALE_PROBABILITIES, means, means + _SCALES[:, None])

        points = self._points(measured)
        if at is None:
            correlations, covariances = self._to_pool(measured)
        else:
            others = self._points(at)
            correlations = points.correlate(others)
            covariances = points.share(others, self._of_value)

        # N^1/2, then Q and L.
        unscaled = noise + points.share(points, self._of_value)
        lower = np.linalg.cholesky(unscaled)
        half = np.linalg.solve(lower, points.correlate(points))
        spread, turned = np.linalg.eigh(np.linalg.solve(lower, half.T))
        spread = np.maximum(spread, 0.0)  # of a matrix that is positive but for rounding

        # What the scale multiplies, what it does not, and the values: in the coordinates of Q.
        whitened = turned.T @ np.linalg.inv(lower)
        apart = whitened @ correlations
        common = whitened @ covariances
        observed = whitened @ values

        squares = _SCALES[:, None] ** 2
        scales = 1 / (squares * spread + 1)
        projected = scales * observed
        means = squares * (projected @ apart) + projected @ common

        explained = squares**2 * (scales @ np.square(apart))
        explained = explained + 2 * squares * (scales @ (apart * common))
        shared = _COMMON**2 + self._of_value.sum()
        variances = squares + shared - explained - scales @ np.square(common)
        deviations = np.sqrt(np.maximum(variances, 1e-12))

        evidence = 0.5 * (np.log(scales).sum(axis=1) - scales @ np.square(observed))
        weights = _SCALE_PROBABILITIES * np.exp(evidence - evidence.max())
        return Mixture(weights / weights.sum(), means, deviations)

    def _to_pool(self, measured: Configs) -> tuple[Array, Array]:
        """Correlations of measured configs with all of the pool, and shared covariances."""
        for config in set(measured) - self._with_all.keys():
            point = self._points([config])
            (correlations,) = point.correlate(self._all)
            (covariances,) = point.share(self._all, self._of_value)
            self._with_all[config] = correlations, covariances

        rows = zip(*(self._with_all[config] for config in measured), strict=True)
        correlations, covariances = map(np.array, rows)
        return correlations, covariances

    def _points(self, configs: Configs) -> _Points:
        """Any configs, as the kernel compares them."""
        return _Points(self._pool.encoded(configs)[:, self._columns], doublings(configs))


@dataclass(frozen=True)
class _Points:
    """Configs by the codes of the knobs they may differ in, and the doublings of their
    micro-batches."""

    codes: Codes
    doublings: Array

    def correlate(self, others: _Points) -> Array:
        """Correlations with others, 1 for the same config: [these, others]."""
        rows = []
        for codes, size in zip(self.codes, self.doublings, strict=True):
            differences = np.count_nonzero(others.codes != codes, axis=1)
            doublings = np.abs(others.doublings - size)
            rows.append(_PER_KNOB**differences * _PER_DOUBLING**doublings)

        return np.array(rows)

    def share(self, others: _Points, of_value: Array) -> Array:
        """Covariances with others that do not depend on the scale: [these, others].

        Args:
            of_value: variances of the errors that all with the same value of a knob share; there is
                one that all configs share.
        """
        same_values = [(others.codes == codes) @ of_value for codes in self.codes]
        return _COMMON**2 + np.array(same_values)
