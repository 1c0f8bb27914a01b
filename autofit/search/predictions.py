"""Predictions of memory and speed, made before any config is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.config import Config
from autofit.search.encoding import Configs, Mask
from autofit.search.linear_model import Array

# A config is left out only where this share of its predicted bytes is too much already: rough
# predictions of small models were up to 28 % too high. For others there is a probability to fit.
_SURE = 0.7


@dataclass(frozen=True)
class Predictions:
    """What is expected of each config, NaN where unknown.

    Attributes:
        nbytes: of tensors.
        seconds: of a step.
        between: configs beside those that were drawn or listed: around the best of them, or with
            numbers between two of the space's values.
    """

    nbytes: Mapping[Config, float]
    seconds: Mapping[Config, float]
    between: tuple[Config, ...] = ()

    @classmethod
    def of(
        cls,
        configs: Configs,
        nbytes: Sequence[float],
        seconds: Sequence[float],
    ) -> Predictions:
        """From figures in the order of the configs."""
        return cls(
            dict(zip(configs, nbytes, strict=True)),
            dict(zip(configs, seconds, strict=True)),
        )

    def surely_exceeds(self, config: Config, limit: float) -> bool:
        """Whether the config needs more bytes than the limit, however wrong the prediction is."""
        return self.nbytes.get(config, np.nan) * _SURE > limit

    def most_promising(
        self,
        configs: Configs,
        limit: float,
        most: int,
    ) -> list[Config]:
        """At most so many configs, in their order: the fastest predicted within the limit, then the
        smallest others.

        Args:
            limit: bytes of tensors.
            most: how many configs.
        """
        nbytes = self.log_bytes(configs)
        too_large = nbytes > np.log(limit)
        last = np.where(too_large, nbytes, -self.log_throughput(configs))
        best = np.lexsort((last, too_large))[:most]
        return [configs[index] for index in sorted(best.tolist())]

    def log_bytes(self, configs: Configs) -> Array:
        """Logarithms of the bytes; the median stands for unknown ones."""
        return _logs(self.nbytes, configs, self._median_bytes)

    def log_throughput(self, configs: Configs) -> Array:
        """Logarithms of steps per second; the median stands for unknown ones."""
        return -_logs(self.seconds, configs, self._median_seconds)

    @cached_property
    def _median_bytes(self) -> float:
        return _median(self.nbytes)

    @cached_property
    def _median_seconds(self) -> float:
        return _median(self.seconds)


def figures(by_config: Mapping[Config, float], configs: Configs) -> Array:
    """The figures of some configs, NaN where unknown."""
    return np.array([by_config.get(config, np.nan) for config in configs], dtype=float)


def is_known(values: Array) -> Mask:
    """Which figures are known, and possible."""
    return np.asarray(np.isfinite(values) & (values > 0))


def _median(by_config: Mapping[Config, float]) -> float:
    """Of those that are known; 1 where none is."""
    values = np.array(list(by_config.values()), dtype=float)
    values = values[is_known(values)]
    return float(np.median(values)) if len(values) else 1.0


def _logs(
    by_config: Mapping[Config, float],
    configs: Configs,
    median: float,
) -> Array:
    """Logarithms of figures; the median stands for unknown ones."""
    values = figures(by_config, configs)
    return np.asarray(np.log(np.where(is_known(values), values, median)))
