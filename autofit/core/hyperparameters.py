"""Hyperparameters: what the user decides about learning, which autofit never changes."""

import math
from dataclasses import dataclass

from autofit.core.errors import InputError

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Hyperparameters:
    """Learning rate, its course, and what keeps it stable. Weight decay falls on matrices only."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr) or self.lr <= 0:
            raise InputError(f"the learning rate must be positive, not {self.lr}.", "For example lr=1e-4.")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}.")
        if self.weight_decay < 0 or self.warmup_steps < 0:
            raise InputError("weight_decay and warmup_steps cannot be negative.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"max_grad_norm must be positive, not {self.max_grad_norm}.", "Leave it out for none.")
