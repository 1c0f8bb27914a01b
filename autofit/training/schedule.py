"""The course of the learning rate, as a function of the step alone: a run that is resumed needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

from autofit.core.workload import Hyperparameters


def learning_rate_factor(hyperparameters: Hyperparameters, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each step (0-based): linear warm-up, then the schedule down to 0."""

    def factor(step: int) -> float:
        warmup = hyperparameters.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if hyperparameters.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - progress if hyperparameters.schedule == "linear" else 1.0

    return factor
