"""The cost of probes: of two configs that promise the same, the cheaper one is measured first.

The logarithm of a probe's seconds is a sum of effects of its knobs (`linear_model`), learnt from
the search so far: deep models take longer to build, others are quantised or compiled first.
"""

import math

import numpy as np

from autofit.core.measurement import that_fit
from autofit.search.linear_model import Array, Features, LinearModel
from autofit.search.ranking import Measurements

_COMPILE = "compile"
_UNCOMPILED = ("none", None)
_COMPILED_ONCE = "default"
# Seconds, before any compiled step is measured: a small Llama's first one took 40 s where a whole
# probe takes 3 s; on an H200 one of 8B in 4 bits was still trying kernels after 195 s where others
# took 6 s.
_COMPILED = 37.0
_AUTOTUNED = 190.0
_USUAL = 5.0  # seconds of a probe, before any is measured

# Standard deviations; on the recorded tables knobs cost up to a factor of 1.6.
_VALUE = 0.3
_SLOPE = 0.15
_NOISE = 0.2
# Outliers are cut to this, in logarithms: another process may have held a probe up.
_FAR = 1.5


def cheapest(measurements: Measurements) -> float:
    """Seconds of the cheapest probe that fitted; infinity before any did."""
    ended = [seen.seconds for seen in that_fit(measurements) if seen.seconds > 0]
    return min(ended, default=math.inf)


class Costs:
    """A model of what probes of configs cost, in seconds."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def seconds(self, measurements: Measurements, rows: Array) -> Array:
        """Expected seconds of probes, up to a factor until something is measured.

        Args:
            rows: [configs, columns], features of the configs to probe.
        """
        configs = []
        seconds = []
        uncompiled = []
        for measurement in measurements:
            if not measurement.fits or measurement.seconds <= 0:
                continue  # probes of configs that do not fit end early
            configs.append(measurement.config)
            seconds.append(measurement.seconds)
            if measurement.config.get(_COMPILE) in _UNCOMPILED:
                uncompiled.append(measurement.seconds)

        model = self._prior(float(np.median(uncompiled)) if uncompiled else _USUAL)
        if configs:
            # Outliers are cut around what the prior expects, scaled to the median probe.
            at = self._features.rows(configs)
            spent = np.log(seconds)
            expected = at @ model.mean
            usual = np.median(spent - expected) + expected
            spent = np.clip(spent, usual - _FAR, usual + _FAR)
            model = model.learn(at, spent, _NOISE)

        return np.asarray(np.exp(rows @ model.mean))

    def _prior(self, usual: float) -> LinearModel:
        """Compiling takes its time, however long the rest of a probe takes that is not compiled."""
        mean = np.zeros(self._features.width)
        for column, (knob, value) in enumerate(self._features.names, start=2):
            if knob == _COMPILE and value not in _UNCOMPILED:
                seconds = _COMPILED if value == _COMPILED_ONCE else _AUTOTUNED
                mean[column] = math.log1p(seconds / usual)

        return LinearModel.prior(mean, slope=_SLOPE, value=_VALUE)
