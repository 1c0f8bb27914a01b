"""What is predicted of configs before any of them is measured, as the search is handed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.config import Config
from autofit.search.linear_model import Array

# A config is left out only where this share of the bytes predicted for it is too much already. Rough predictions of
# small models were seen to be 28 % too high; what lies between is for the probability to fit.
_SURE = 0.7


@dataclass(frozen=True)
class Predictions:
    """Bytes of tensors and seconds of a step for each config, NaN where nothing is known.

    Both are trusted up to effects of knobs that measurements show to be other than predicted.
    """

    nbytes: Mapping[Config, float]
    seconds: Mapping[Config, float]

    @classmethod
    def of(cls, configs: Sequence[Config], nbytes: Sequence[float], seconds: Sequence[float]) -> Predictions:
        """From figures in the order of the configs."""
        return cls(dict(zip(configs, nbytes, strict=True)), dict(zip(configs, seconds, strict=True)))

    def surely_exceeds(self, config: Config, limit: float) -> bool:
        """Whether the config needs more bytes than that, however wrong the prediction is."""
        return self.nbytes.get(config, np.nan) * _SURE > limit

    def most_promising(self, configs: Sequence[Config], limit: float, most: int) -> list[Config]:
        """At most so many, in their order: the fastest of those expected within the limit, then the smallest others."""
        nbytes, throughput = self.log_bytes(configs), self.log_throughput(configs)
        too_large = nbytes > np.log(limit)
        best = np.lexsort((np.where(too_large, nbytes, -throughput), too_large))[:most]
        return [configs[place] for place in sorted(best.tolist())]

    def log_bytes(self, configs: Sequence[Config]) -> Array:
        """Logarithms of the bytes; of what is not known, that of the median of all."""
        return _logs(self.nbytes, configs, self._usual_bytes)

    def log_throughput(self, configs: Sequence[Config]) -> Array:
        """Logarithms of steps per second; of what is not known, that of the median of all."""
        return -_logs(self.seconds, configs, self._usual_seconds)

    @cached_property
    def _usual_bytes(self) -> float:
        return _usual(self.nbytes)

    @cached_property
    def _usual_seconds(self) -> float:
        return _usual(self.seconds)


def _usual(known: Mapping[Config, float]) -> float:
    figures = np.array(list(known.values()), dtype=float)
    figures = figures[np.isfinite(figures) & (figures > 0)]
    return float(np.median(figures)) if len(figures) else 1.0


def _logs(known: Mapping[Config, float], configs: Sequence[Config], middle: float) -> Array:
    values = np.array([known.get(config, np.nan) for config in configs], dtype=float)
    return np.asarray(np.log(np.where(np.isfinite(values) & (values > 0), values, middle)))
