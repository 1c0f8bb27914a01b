"""A group of configs as the models see them: features of each, and what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.search.encoding import Configs
from autofit.search.linear_model import Array, Features
from autofit.search.predictions import Predictions


@dataclass(frozen=True)
class Group:
    """Configs with their features, and logarithms of their predicted bytes and steps per second,
    which are 0 without predictions."""

    configs: Configs
    rows: Array
    nbytes: Array
    speed: Array

    @classmethod
    def of(
        cls,
        configs: Configs,
        features: Features,
        predictions: Predictions | None,
    ) -> Group:
        """The group of some configs."""
        rows = features.rows(configs)
        if predictions is None:
            nothing = np.zeros(len(configs))
            return cls(configs, rows, nothing, nothing)

        nbytes = predictions.log_bytes(configs)
        return cls(configs, rows, nbytes, predictions.log_throughput(configs))
