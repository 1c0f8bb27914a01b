"""The Gaussian process: errors of predicted speeds, config by config, learnt from the measurements so far.

It models the logarithm of measured / predicted (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
algorithm 2.1). Configs are the more alike the fewer knobs they differ in, so a knob's error may depend on the others;
the error that all share is learnt from the first probe, and values of some knobs have one of their own, so that what is
wrong of one kernel is not believed of all others. The scale of the errors on this device is learnt too: a mixture of
several scales, weighted by their evidence.

Chosen over additive effects on four recorded tables (benchmarks/searches/tables): for 3, 6, 12 and 24 measured configs
its predictions of the others were nearer in each, and its uncertainty was right more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.search.encoding import MICRO_BATCH, Codes, Encoding, doublings
from autofit.search.linear_model import Array

# Standard deviations of errors with their prior probabilities: recorded tables had 0.09 to 0.14; on a device that was
# never measured, and for techniques whose cost is assumed, they may be a few times larger.
_SCALES, _LIKELY = np.array([0.06, 0.13, 0.26, 0.52]), np.array([0.15, 0.55, 0.2, 0.1])
_ALIKE, _ALIKE_PER_DOUBLING = 0.75, 0.85  # 0.5 to 0.8 did as well within a few per cent
_COMMON = 0.4  # of the shared error: tables had 0.3; more would hide that the first probe was chosen too well
# Of the error that all configs with a value share, where it decides whose kernels a whole model runs. On an H200 steps
# in int8 took 1.8 times as long as predicted, those in 4 bits 1.15 times: without this, a search measured int8 ten
# times and never 4 bits, which were predicted 9 % slower. The same for compilation found no better configs, and took
# longer.
_OF_VALUE = {"quantization": 0.2}


@dataclass(frozen=True)
class Mixture:
    """A mixture of normal distributions per config: weights [scales], means and deviations [scales, configs]."""

    weights: Array
    means: Array
    deviations: Array

    @property
    def mean(self) -> Array:
        return np.asarray(self.weights @ self.means)


class GaussianProcess:
    """The process over the configs of a pool, which may differ in `knobs`; the micro-batch counts by its doublings."""

    def __init__(self, knobs: Sequence[str], pool: Encoding) -> None:
        self._pool = pool
        self._columns = [index for index, knob in enumerate(pool.knobs) if knob in knobs and knob != MICRO_BATCH]
        self._of_value = np.array([_OF_VALUE.get(pool.knobs[index], 0.0) for index in self._columns]) ** 2
        self._all = _Points(pool.codes[:, self._columns], pool.doublings)
        # Of a measured config with each of the pool: correlations, and covariances that do not depend on the scale.
        self._with_all: dict[Config, tuple[Array, Array]] = {}

    def predict(
        self, measured: Sequence[Config], values: Array, noise: Array, at: Sequence[Config] | None = None
    ) -> Mixture:
        """The posterior at some configs, given measured ones.

        The systems of all scales are solved through one decomposition, as there may be tens of thousands of configs:
        with N the covariance that does not depend on the scale s, and A the correlations of the measured configs,
        N^-1/2 A N^-T/2 = Q L Q^T, so that (s^2 A + N)^-1 = N^-T/2 Q (s^2 L + 1)^-1 Q^T N^-1/2.

        Args:
            values: logarithms of measured / predicted speed.
            noise: the covariance of their errors.
            at: None: all of the pool.
        """
        count = len(self._pool.codes) if at is None else len(at)
        if not len(values):
            none = np.zeros((len(_SCALES), count))
            return Mixture(_LIKELY, none, none + _SCALES[:, None])
        points = self._points(measured)
        if at is None:
            for config in set(measured) - self._with_all.keys():
                own = self._points([config])
                self._with_all[config] = own.correlate(self._all)[0], own.share(self._all, self._of_value)[0]
            alike, shared = (np.array([self._with_all[config][of] for config in measured]) for of in (0, 1))
        else:
            others = self._points(at)
            alike, shared = points.correlate(others), points.share(others, self._of_value)
        lower = np.linalg.cholesky(noise + points.share(points, self._of_value))
        half = np.linalg.solve(lower, points.correlate(points))
        spread, turned = np.linalg.eigh(np.linalg.solve(lower, half.T))
        spread = np.maximum(spread, 0.0)  # of a matrix that is positive but for rounding
        whole = turned.T @ np.linalg.inv(lower)
        apart, common, observed = whole @ alike, whole @ shared, whole @ values
        scales = 1 / (_SCALES[:, None] ** 2 * spread + 1)
        squares = _SCALES[:, None] ** 2
        means = squares * ((scales * observed) @ apart) + (scales * observed) @ common
        explained = squares**2 * (scales @ np.square(apart)) + 2 * squares * (scales @ (apart * common))
        unscaled = _COMMON**2 + self._of_value.sum()
        variances = squares + unscaled - explained - scales @ np.square(common)
        evidence = 0.5 * (np.log(scales).sum(axis=1) - scales @ np.square(observed))
        weights = _LIKELY * np.exp(evidence - evidence.max())
        return Mixture(weights / weights.sum(), means, np.sqrt(np.maximum(variances, 1e-12)))

    def _points(self, configs: Sequence[Config]) -> _Points:
        return _Points(self._pool.encoded(configs)[:, self._columns], doublings(configs))


@dataclass(frozen=True)
class _Points:
    """Configs by the codes of the knobs they may differ in, and the doublings of their micro-batches."""

    codes: Codes
    doublings: Array

    def correlate(self, others: _Points) -> Array:
        """Correlations with others, 1 for the same config: [these, others]."""
        rows = []
        for codes, size in zip(self.codes, self.doublings, strict=True):
            differences = np.count_nonzero(others.codes != codes, axis=1)
            rows.append(_ALIKE**differences * _ALIKE_PER_DOUBLING ** np.abs(others.doublings - size))
        return np.array(rows)

    def share(self, others: _Points, of_value: Array) -> Array:
        """Covariances with others of the errors that all share, or all with the same value of a knob, whose variances
        are `of_value`: [these, others]."""
        return _COMMON**2 + np.array([(others.codes == codes) @ of_value for codes in self.codes])
