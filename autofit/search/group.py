"""A group of configs as the models see them: features of each, and what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.search.encoding import Configs
from autofit.search.linear_model import Array, Features
from autofit.search.objectives import Objective
from autofit.search.objectives.discounted import RAW_SPEED
from autofit.search.predictions import Predictions


@dataclass(frozen=True)
class Group:
    """Configs with their features, and logarithms.

    Attributes:
        nbytes, speed: of their predicted bytes and steps per second, 0 without predictions.
        discount: of what the objective divides their speeds by.
    """

    configs: Configs
    rows: Array
    nbytes: Array
    speed: Array
    discount: Array

    @classmethod
    def of(
        cls,
        configs: Configs,
        features: Features,
        predictions: Predictions | None,
        objective: Objective = RAW_SPEED,
    ) -> Group:
        """The group of some configs."""
        rows = features.rows(configs)
        discount = np.log(np.array([objective.discount(config) for config in configs], dtype=float))
        if predictions is None:
            nothing = np.zeros(len(configs))
            return cls(configs, rows, nothing, nothing, discount)

        nbytes = predictions.log_bytes(configs)
        speed = predictions.log_throughput(configs)
        return cls(configs, rows, nbytes, speed, discount)
