"""Bayesian linear regression over knobs: a quantity's logarithm is a sum of effects, one for each value of each knob,
and a slope over log2(micro_batch_size).

Knobs mostly multiply time and memory (checkpointing costs about a third more time whatever the precision), so they add
in logarithms. A value that was never measured keeps its prior (Bishop, "Pattern Recognition and Machine Learning", 3.49
- 3.59). The model is rough (memory is really a sum, not a product), but learns from a handful of probes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autofit.core.config import Config, Value
from autofit.search.encoding import MICRO_BATCH, doublings

Array = npt.NDArray[np.float64]

_INTERCEPT_DEVIATION = 30.0  # wide: logarithms of bytes lie near 23, of samples per second anywhere from -5 to 10


class Features:
    """A Config as a row of numbers: an intercept, the slope over the micro-batch, then 0 or 1 for each value of a knob.
    An unknown value is a row of zeros for its knob. `width` is the number of columns."""

    def __init__(self, values: Mapping[str, Sequence[Value]]) -> None:
        self.names = tuple((knob, value) for knob, each in values.items() for value in each)
        self.width = 2 + len(self.names)
        self._column = {name: column for column, name in enumerate(self.names, start=2)}
        sizes = doublings([{MICRO_BATCH: value} for value in values.get(MICRO_BATCH, ())])
        self._middle = float(sizes.mean()) if len(sizes) else 0.0

    def rows(self, configs: Sequence[Config]) -> Array:
        """One row for each config."""
        rows = np.zeros((len(configs), self.width))
        rows[:, 0], rows[:, 1] = 1.0, doublings(configs) - self._middle
        for row, config in zip(rows, configs, strict=True):
            for item in config.items():
                if item in self._column:
                    row[self._column[item]] = 1.0
        return rows


@dataclass(frozen=True)
class LinearModel:
    """The effects on one quantity, before or after measurements: a mean and a covariance."""

    mean: Array  # [columns]
    prior_variances: Array  # [columns]
    gain: Array  # [measurements, columns], K with covariance = diag(prior_variances) - K^T K: measurements are few
    surprise: float = 0.0  # squared deviations of what was learnt from what was expected before it
    learnt: int = 0  # values

    @classmethod
    def prior(cls, mean: Array, *, intercept: float = _INTERCEPT_DEVIATION, slope: float, value: float) -> LinearModel:
        """Independent effects around `mean`, with the standard deviations given for the three kinds."""
        deviations = np.full(len(mean), value, dtype=np.float64)
        deviations[:2] = intercept, slope
        return cls(mean, deviations**2, np.zeros((0, len(mean))))

    def learn(self, rows: Array, values: Array, noise: Array | float) -> LinearModel:
        """The effects given `values` at `rows`; `noise` is the covariance of their errors or a standard deviation."""
        if not len(values):
            return self
        # The gain form needs one small system of the size of the measurements, and keeps a zero variance zero.
        spread = rows * self.prior_variances - (rows @ self.gain.T) @ self.gain
        errors = noise if np.ndim(noise) == 2 else np.diag(np.broadcast_to(np.square(noise), len(values)))
        lower = np.linalg.cholesky(spread @ rows.T + errors)
        gain, off = np.linalg.solve(lower, spread), np.linalg.solve(lower, values - rows @ self.mean)
        mean, surprise, learnt = self.mean + off @ gain, self.surprise + float(off @ off), self.learnt + len(values)
        gain = np.vstack([self.gain, gain])
        if len(gain) > len(mean):  # as many rows as columns suffice
            gain = np.asarray(np.linalg.qr(gain, mode="r"))
        return LinearModel(mean, self.prior_variances, gain, surprise, learnt)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the quantity at each row, without the noise of a measurement."""
        slopes = rows[:, 1]  # other features are 0 or 1, their own squares
        # One product instead of three, since passing over all rows takes the time.
        mean, before, *gain = np.vstack([self.mean, self.prior_variances, self.gain]) @ rows.T
        variance = before + (np.square(slopes) - slopes) * self.prior_variances[1]
        variance -= np.square(gain).sum(axis=0) if gain else 0.0
        return mean, np.sqrt(np.maximum(variance, 0.0))


def normal_density(z: Array) -> Array:
    """The density of the standard normal distribution."""
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def normal_below(z: Array) -> Array:
    """The probability of a standard normal variable to lie below z, to 1.5e-7. Abramowitz and Stegun, "Handbook of
    Mathematical Functions", 7.1.26; numpy has none, math.erf is for one z."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    powers = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    above = 0.5 * powers * t * np.exp(-x * x)
    return np.asarray(np.where(z < 0, above, 1 - above))
