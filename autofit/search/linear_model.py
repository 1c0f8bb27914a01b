"""Bayesian linear regression over knobs: the logarithm of a quantity is a sum of effects, one for
each value of each knob, and a slope over log2(micro_batch_size).

Knobs mostly multiply time and memory (checkpointing costs about a third more time whatever the
precision), so they add in logarithms. A value that was never measured keeps its prior (Bishop,
"Pattern Recognition and Machine Learning", 3.49 - 3.59). The model is rough (memory is really a
sum, not a product), but learns from a handful of probes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autofit.core.config import Config, Value
from autofit.search.encoding import MICRO_BATCH, Configs, KnobValues, doublings

Array = npt.NDArray[np.float64]

# Wide: logarithms of bytes lie near 23, of samples per second anywhere from -5 to 10.
_INTERCEPT_DEVIATION = 30.0


class Features:
    """A Config as a row of numbers: an intercept, the slope over the micro-batch, then 0 or 1 for
    each value of a knob.

    An unknown value is a row of zeros for its knob. The micro-batch counts by its doublings from
    the middle of those that the space lists.

    Attributes:
        names: knob and value of every column but the first two.
        width: the number of columns.
    """

    def __init__(self, values: KnobValues) -> None:
        self.values = values
        self.names: list[tuple[str, Value]] = []
        for knob, choices in values.items():
            self.names.extend((knob, value) for value in choices)

        self.width = 2 + len(self.names)
        self._column = {name: column for column, name in enumerate(self.names, start=2)}

        sizes = doublings([Config({MICRO_BATCH: size}) for size in values.get(MICRO_BATCH, ())])
        self._middle = float(sizes.mean()) if len(sizes) else 0.0

    def rows(self, configs: Configs) -> Array:
        """One row for each config: [configs, columns]."""
        rows = np.zeros((len(configs), self.width))
        rows[:, 0] = 1.0
        rows[:, 1] = doublings(configs) - self._middle
        for row, config in zip(rows, configs, strict=True):
            for item in config.items():
                if item in self._column:
                    row[self._column[item]] = 1.0

        return rows


@dataclass(frozen=True)
class LinearModel:
    """The effects on one quantity, before or after measurements.

    Attributes:
        mean: [columns].
        prior_variances: [columns].
        gain: [measurements, columns], K of the covariance diag(prior_variances) - K^T K, because
            measurements are few.
        surprise: squared deviations of what was learnt from what was expected before it.
        learnt: how many values were.
    """

    mean: Array
    prior_variances: Array
    gain: Array
    surprise: float = 0.0
    learnt: int = 0

    @classmethod
    def prior(
        cls,
        mean: Array,
        *,
        intercept: float = _INTERCEPT_DEVIATION,
        slope: float,
        value: float,
    ) -> LinearModel:
        """Independent effects around a mean.

        Args:
            mean: of each column of `Features`.
            intercept: the standard deviation of the first column.
            slope: that of the second, the effect of a doubling of the micro-batch.
            value: that of all others.
        """
        deviations = np.full(len(mean), value, dtype=np.float64)
        deviations[:2] = intercept, slope
        return cls(mean, deviations**2, np.zeros((0, len(mean))))

    def learn(
        self,
        rows: Array,
        values: Array,
        noise: Array | float,
    ) -> LinearModel:
        """The effects given values of the quantity.

        Args:
            rows: [values, columns], the features of what was measured.
            values: logarithms.
            noise: of the values: the covariance of their errors, or standard deviations.
        """
        if not len(values):
            return self

        # This form needs one small system of the size of the measurements, and keeps a variance
        # of zero at zero.
        if np.ndim(noise) < 2:
            noise = np.diag(np.broadcast_to(np.square(noise), len(values)))

        spread = rows * self.prior_variances - (rows @ self.gain.T) @ self.gain
        lower = np.linalg.cholesky(spread @ rows.T + noise)
        gain = np.linalg.solve(lower, spread)
        off = np.linalg.solve(lower, values - rows @ self.mean)

        gains = np.vstack([self.gain, gain])
        if len(gains) > len(self.mean):  # as many rows as columns suffice
            gains = np.asarray(np.linalg.qr(gains, mode="r"))
        return LinearModel(
            mean=self.mean + off @ gain,
            prior_variances=self.prior_variances,
            gain=gains,
            surprise=self.surprise + float(off @ off),
            learnt=self.learnt + len(values),
        )

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the quantity at each row, without the noise of a
        measurement."""
        # One product instead of three, since passing over all rows takes the time.
        columns = np.vstack([self.mean, self.prior_variances, self.gain])
        mean, variance, *explained = columns @ rows.T

        slopes = rows[:, 1]  # other features are 0 or 1, their own squares
        variance = variance + (np.square(slopes) - slopes) * self.prior_variances[1]
        if explained:
            variance -= np.square(explained).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, 0.0))


def normal_density(z: Array) -> Array:
    """The density of the standard normal distribution."""
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def normal_below(z: Array) -> Array:
    """The probability of a standard normal variable to lie below z, to 1.5e-7.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26: numpy has none, and
    math.erf takes one z.
    """
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    powers = 1.061405429 * t - 1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        powers = powers * t + coefficient

    above = 0.5 * powers * t * np.exp(-x * x)
    return np.asarray(np.where(z < 0, above, 1 - above))
