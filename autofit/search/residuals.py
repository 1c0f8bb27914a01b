"""How far off predictions of speed are, config by config, as the measurements so far tell.

A Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1) over the logarithm
of measured / predicted. Configs are the more alike the fewer knobs they differ in, so that what a knob is off by may
depend on the others; what all predictions are off by together is learnt from the first probe. How good predictions are
on this device at all is learnt too: several scales of their errors are kept, each as likely as what was seen makes it.

Chosen on four recorded tables (benchmarks/tables) over effects of knobs that add: for 3, 6, 12 and 24 measured configs
its predictions of the others were nearer in each, and what it says of its own doubt was right more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config
from autofit.search.columns import MICRO_BATCH, Columns
from autofit.search.effects import Array

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


class Residuals:
    """What is learnt for the configs of a pool.

    Args:
        knobs: those that the configs may differ in; the micro-batch counts by its doublings in any case.
        noise: of measurements, as a standard deviation of logarithms.
    """

    def __init__(self, knobs: Sequence[str], pool: Columns, *, noise: float) -> None:
        self._noise = noise
        self._knobs = [knob for knob in knobs if knob != MICRO_BATCH]
        self._pool = pool
        self._likeness: dict[Config, Array] = {}  # of a measured config to each of the pool

    def predict(self, measured: Sequence[Config], values: Array, at: Columns) -> Mixture:
        """What is expected at these configs, given what was measured.

        Args:
            values: logarithms of measured / predicted speed.
        """
        if not len(values):
            none = np.zeros((len(_SCALES), len(at.codes)))
            return Mixture(_LIKELY, none, none + _SCALES[:, None])
        among, there = self._like_all(measured, Columns(measured)), self._like_all(measured, at)
        noise = np.eye(len(values)) * self._noise**2 + _COMMON**2
        evidence, means, variances = [], [], []
        for scale in _SCALES.tolist():
            lower = np.linalg.inv(np.linalg.cholesky(scale**2 * among + noise))  # small, and applied to all of a pool
            known, solved = lower @ values, lower @ (scale**2 * there + _COMMON**2)
            means.append(known @ solved)
            variances.append(scale**2 + _COMMON**2 - np.einsum("ij,ij->j", solved, solved))
            evidence.append(-0.5 * known @ known + np.log(np.diag(lower)).sum())
        weights = _LIKELY * np.exp(np.array(evidence) - max(evidence))
        deviations = np.sqrt(np.maximum(np.array(variances), 1e-12))
        return Mixture(weights / weights.sum(), np.array(means), deviations)

    def _like_all(self, measured: Sequence[Config], configs: Columns) -> Array:
        """How alike configs are to each measured one, 1 for the same: [measured, configs]."""
        if configs is not self._pool:
            return np.array([self._alike(config, configs) for config in measured])
        for config in measured:
            if config not in self._likeness:
                self._likeness[config] = self._alike(config, configs)
        return np.array([self._likeness[config] for config in measured])

    def _alike(self, config: Config, others: Columns) -> Array:
        apart = np.abs(others.doublings - Columns([config]).doublings)
        return np.asarray(_ALIKE ** others.differences(config, self._knobs) * _ALIKE_PER_DOUBLING**apart)
