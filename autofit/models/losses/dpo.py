"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), and what followed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.tasks.dpo import DPO as TASK
from autofit.core.tasks.dpo import KINDS
from autofit.models.losses.preference import (
    answer_log_probabilities,
    answer_tokens,
    reference_log_probabilities,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DPO:
    """(models, batch) -> the mean loss over pairs of a better and a worse answer.

    Args:
        beta: how closely the model is held to the reference.
        kind: `sigmoid` (equation 7 of the paper), `hinge` (SLiC, arXiv:2305.10425), `ipo`
            (arXiv:2310.12036, equation 17, of mean log-probabilities), `robust`
            (arXiv:2403.00409).
        label_smoothing: the share of pairs that are the wrong way round; of `robust`, and of
            `sigmoid` (conservative DPO).

    Raises:
        InputError: for a value that it does not take.
    """

    beta: float = 0.1
    kind: str = "sigmoid"
    label_smoothing: float = 0.0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True
    frozen: ClassVar[Mapping[str, None]] = dict.fromkeys(TASK.frozen)

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            f"kind must be one of {', '.join(KINDS)}",
            self.kind,
        )
        require(self.beta > 0, "beta must be positive", self.beta)
        fine = 0 <= self.label_smoothing < 0.5
        require(fine, "label_smoothing must be from 0 to below 0.5", self.label_smoothing)

    def __call__(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        # first, while the trained model has saved nothing for its backward
        before = self.precomputed(models, batch)
        ratios = answer_log_probabilities(models["model"], batch) - before
        if self.kind == "ipo":
            ratios = ratios / answer_tokens(batch)

        better, worse = ratios.unbind(dim=1)
        margin = better - worse
        if self.kind == "ipo":
            return ((margin - 1 / (2 * self.beta)) ** 2).mean()
        if self.kind == "hinge":
            return torch.relu(1 - self.beta * margin).mean()

        right = -torch.nn.functional.logsigmoid(self.beta * margin)
        wrong = -torch.nn.functional.logsigmoid(-self.beta * margin)
        smoothing = self.label_smoothing
        if self.kind == "robust":
            return ((1 - smoothing) * right - smoothing * wrong).mean() / (1 - 2 * smoothing)

        return ((1 - smoothing) * right + smoothing * wrong).mean()

    def precomputed(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        """What batches may hold as "reference": the log-probability of each answer, [pairs, 2]."""
        return reference_log_probabilities(models, batch)
