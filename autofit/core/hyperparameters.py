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
        if not _is_number(self.lr) or self.lr <= 0:
            raise InputError(f"the learning rate must be positive, not {self.lr!r}.", "For example lr=1e-4.")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}.")
        for name in ("weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise InputError(f"{name} must be a number of at least 0, not {value!r}.")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed must be a whole number of at most 63 bits, not {self.seed!r}.", "For example 0.")
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise InputError(f"max_grad_norm must be positive, not {self.max_grad_norm!r}.", "Leave it out for none.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
