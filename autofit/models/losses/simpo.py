"""Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734): no reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.tasks.simpo import SIMPO as TASK
from autofit.models.losses.preference import answer_log_probabilities, answer_tokens

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SimPO:
    """(model, batch) -> the mean loss over pairs of a better and a worse answer (equation 6).

    Args:
        beta: the weight of the difference of mean log-probabilities.
        gamma: by how much that should exceed zero, after `beta`.

    Raises:
        InputError: for a value that it does not take.
    """

    beta: float = 2.0
    gamma: float = 1.0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta must be positive", self.beta)
        require(self.gamma >= 0, "gamma must not be negative", self.gamma)

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        means = answer_log_probabilities(model, batch) / answer_tokens(batch)
        better, worse = means.unbind(dim=1)
        margin = self.beta * (better - worse) - self.gamma
        return -torch.nn.functional.logsigmoid(margin).mean()
