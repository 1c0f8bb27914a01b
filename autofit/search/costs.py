"""The cost of probes: of two configs that promise the same, the cheaper one is measured first.

The logarithm of a probe's seconds is a sum of effects of its knobs (`linear_model`), learnt from the search so far:
deep models take longer to build, others are quantised or compiled first.
"""

import math
from collections.abc import Sequence

import numpy as np

from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array, Features, LinearModel

_COMPILE = "compile"
# Seconds, before any compiled step is measured: a small Llama's first one took 40 s where a whole probe takes 3 s; on
# an H200 one of 8B in 4 bits was still trying kernels after 195 s where others took 6 s.
_COMPILED, _AUTOTUNED = 37.0, 190.0
_USUAL = 5.0  # seconds of a probe, before any is measured
_UNCOMPILED, _COMPILED_ONCE = ("none", None), "default"
_VALUE, _SLOPE, _NOISE = 0.3, 0.15, 0.2  # standard deviations; on the recorded tables knobs cost up to a factor of 1.6
_FAR = 1.5  # outliers are cut to this (in logarithms): another process may have held a probe up


class Costs:
    """Costs of configs with these features."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def seconds(self, measurements: Sequence[Measurement], rows: Array) -> Array:
        """Expected seconds of a probe of configs with these features, up to a factor until something is measured."""
        whole = [each for each in measurements if each.fits and each.seconds > 0]  # others end early
        plain = [each.seconds for each in whole if each.config.get(_COMPILE) in _UNCOMPILED]
        prior = self._prior(float(np.median(plain)) if plain else _USUAL)
        if not whole:
            return np.asarray(np.exp(rows @ prior.mean))
        at = self._features.rows([each.config for each in whole])
        spent = np.log([each.seconds for each in whole])
        usual = np.median(spent - at @ prior.mean) + at @ prior.mean
        learnt = prior.learn(at, np.clip(spent, usual - _FAR, usual + _FAR), _NOISE)
        return np.asarray(np.exp(rows @ learnt.mean))

    def _prior(self, usual: float) -> LinearModel:
        """Compiling takes its time, however long the rest of a probe takes that is not compiled."""
        mean = np.zeros(self._features.width)
        for column, (knob, value) in enumerate(self._features.names, start=2):
            if knob == _COMPILE and value not in _UNCOMPILED:
                mean[column] = math.log1p((_COMPILED if value == _COMPILED_ONCE else _AUTOTUNED) / usual)
        return LinearModel.prior(mean, slope=_SLOPE, value=_VALUE)
