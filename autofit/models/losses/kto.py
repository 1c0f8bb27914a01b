"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306): answers that are good
or bad by themselves, without pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.tasks.kto import KTO as TASK
from autofit.models.losses.preference import (
    answer_log_probabilities,
    reference_log_probabilities,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KTO:
    """(models, batch) -> the mean loss over answers (equation 8).

    A batch holds for each prompt its answer, then that of another prompt: `input_ids`,
    `attention_mask` and `labels` [samples, 2, tokens], and whether each answer is `desirable`
    [samples]. The second ones tell how far the model is from the reference: a mean over the whole
    batch, at least 0, found before and without gradients.

    Args:
        beta: how closely the model is held to the reference.
        desirable_weight, undesirable_weight: of good and of bad answers.

    Raises:
        InputError: for a value that it does not take.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True
    frozen: ClassVar[Mapping[str, None]] = dict.fromkeys(TASK.frozen)

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta must be positive", self.beta)
        for name in ("desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive", value)

    def over_batch(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        """The sum over samples of log-probability ratios of the answers to other prompts, and the
        number of samples, [2]."""
        import torch

        others = _only(batch, 1)
        before = reference_log_probabilities(models, others)
        ratios = answer_log_probabilities(models["model"], others) - before
        return torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]).double()

    def __call__(
        self,
        models: Mapping[str, Any],
        batch: Mapping[str, Any],
        over_batch: torch.Tensor,
    ) -> torch.Tensor:
        import torch

        answers = _only(batch, 0)
        before = reference_log_probabilities(models, answers)
        ratios = (answer_log_probabilities(models["model"], answers) - before).squeeze(1)

        distance = (over_batch[0] / over_batch[1]).clamp(min=0).to(ratios.dtype)
        is_good = batch["desirable"] != 0
        gain = torch.where(is_good, ratios - distance, distance - ratios)
        weights = torch.where(is_good, self.desirable_weight, self.undesirable_weight)

        return (weights * (1 - torch.sigmoid(self.beta * gain))).mean()

    def precomputed(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        """What batches may hold as "reference": the log-probability of each text, [samples, 2]."""
        return reference_log_probabilities(models, batch)


def _only(batch: Mapping[str, Any], column: int) -> dict[str, Any]:
    """The batch with the first or the second text of each sample alone."""
    return {
        name: tensor[:, column : column + 1]
        for name, tensor in batch.items()
        if name != "desirable"
    }
