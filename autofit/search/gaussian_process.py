"""How far off predictions of speed are, config by config, as the measurements so far tell.

A Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1) over the logarithm
of measured / predicted. Configs are the more alike the fewer knobs they differ in, so that what a knob is off by may
depend on the others; what all predictions are off by together is learnt from the first probe. How good predictions are
on this device at all is learnt too: several scales of their errors are kept, each as likely as what was seen makes it.

Chosen on four recorded tables (benchmarks.replay) over effects of knobs that add: for 3, 6, 12 and 24 measured configs
its predictions of the others were nearer in each, and what it says of its own doubt was right more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.search.encoding import MICRO_BATCH, Codes, Columns, doublings
from autofit.search.linear_model import Array

# Standard deviations of errors, and how likely each is before any probe: 0.09 to 0.14 were seen on recorded tables; on
# a device that was never measured, and for techniques whose cost is assumed, they may be a few times larger.
_SCALES, _LIKELY = np.array([0.06, 0.13, 0.26, 0.52]), np.array([0.15, 0.55, 0.2, 0.1])
_ALIKE, _ALIKE_PER_DOUBLING = 0.75, 0.85  # 0.5 to 0.8 did within a few per cent as well
_COMMON = 0.4  # what all are off by together: 0.3 was seen; more would hide that the first probe was chosen too well


@dataclass(frozen=True)
class Mixture:
    """Normal distributions for each config, one for each scale: weights [scales], the others [scales, configs]."""

    weights: Array
    means: Array
    deviations: Array

    @property
    def mean(self) -> Array:
        """Of each config."""
        return np.asarray(self.weights @ self.means)


class GaussianProcess:
    """What is learnt for the configs of a pool.

    Args:
        knobs: those that the configs may differ in; the micro-batch counts by its doublings in any case.
        noise: of measurements, as a standard deviation of logarithms.
    """

    def __init__(self, knobs: Sequence[str], pool: Columns, *, noise: float) -> None:
        self._noise = noise
        self._pool = pool
        self._columns = [place for place, knob in enumerate(pool.knobs) if knob in knobs and knob != MICRO_BATCH]
        self._all = _Places(pool.codes[:, self._columns], pool.doublings)
        self._likeness: dict[Config, Array] = {}  # of a measured config to each of the pool

    def predict(
        self,
        measured: Sequence[Config],
        values: Array,
        at: Sequence[Config] | None = None,
        *,
        noise: Array | None = None,
    ) -> Mixture:
        """What is expected at some configs, given what was measured.

        The systems of all scales are solved through one decomposition, as there may be tens of thousands of configs:
        with N the covariance of what does not depend on the scale s, and A how alike the measured are,
        N^-1/2 A N^-T/2 = Q L Q^T, so that (s^2 A + N)^-1 = N^-T/2 Q (s^2 L + 1)^-1 Q^T N^-1/2.

        Args:
            values: logarithms of measured / predicted speed.
            at: None: all of the pool.
            noise: the covariance of the values' errors, where these are not independent.
        """
        count = len(self._pool.codes) if at is None else len(at)
        if not len(values):
            none = np.zeros((len(_SCALES), count))
            return Mixture(_LIKELY, none, none + _SCALES[:, None])
        there = self._like_pool(measured) if at is None else self._places(measured).alike(self._places(at))
        among = self._places(measured).alike(self._places(measured))
        errors = np.eye(len(values)) * self._noise**2 if noise is None else noise
        lower = np.linalg.cholesky(errors + _COMMON**2)
        half = np.linalg.solve(lower, among)
        spread, turned = np.linalg.eigh(np.linalg.solve(lower, half.T))
        spread = np.maximum(spread, 0.0)  # of a matrix that is positive but for rounding
        whole = turned.T @ np.linalg.inv(lower)
        apart, common, known = whole @ there, whole @ np.full(len(values), _COMMON**2), whole @ values
        scales = 1 / (_SCALES[:, None] ** 2 * spread + 1)
        squares = _SCALES[:, None] ** 2
        means = squares * ((scales * known) @ apart) + ((scales * known) @ common)[:, None]
        explained = squares**2 * (scales @ np.square(apart)) + 2 * squares * ((scales * common) @ apart)
        variances = squares + _COMMON**2 - explained - (scales @ np.square(common))[:, None]
        evidence = 0.5 * (np.log(scales).sum(axis=1) - scales @ np.square(known))
        weights = _LIKELY * np.exp(evidence - evidence.max())
        return Mixture(weights / weights.sum(), means, np.sqrt(np.maximum(variances, 1e-12)))

    def _like_pool(self, measured: Sequence[Config]) -> Array:
        """How alike each config of the pool is to each measured one: [measured, pool]."""
        new = [config for config in measured if config not in self._likeness]
        for config in new:
            self._likeness[config] = self._places([config]).alike(self._all)[0]
        return np.array([self._likeness[config] for config in measured])

    def _places(self, configs: Sequence[Config]) -> _Places:
        return _Places(self._pool.encoded(configs)[:, self._columns], doublings(configs))


@dataclass(frozen=True)
class _Places:
    """Configs by the codes of what they may differ in, and the doublings of their micro-batches."""

    codes: Codes
    doublings: Array

    def alike(self, others: _Places) -> Array:
        """How alike each is to each of others, 1 for the same: [these, others]."""
        rows = []
        for codes, size in zip(self.codes, self.doublings, strict=True):
            differences = np.count_nonzero(others.codes != codes, axis=1)
            rows.append(_ALIKE**differences * _ALIKE_PER_DOUBLING ** np.abs(others.doublings - size))
        return np.array(rows)
