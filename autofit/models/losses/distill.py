"""Distillation: to say of each next token what a larger model says of it (Hinton et al. 2015,
arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.task import IGNORED_LABEL, TEACHER
from autofit.core.tasks.distill import DISTILL as TASK
from autofit.models.losses.by_token import by_token

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Distill:
    """(models, batch) -> the mean divergence of the model from its teacher, over tokens that count.

    The teacher is `models["teacher"]`. Where one vocabulary is longer, by padding, its end is left
    out.

    Args:
        mixture: 0: forward KL(teacher || model); 1: reverse KL(model || teacher); between: the
            generalised Jensen-Shannon divergence (arXiv:2306.13649, equation 1, beta).
        temperature: divides the logits of both.

    Raises:
        InputError: for a value that it does not take.
    """

    mixture: float = 0.0
    temperature: float = 1.0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fine = 0 <= self.mixture <= 1
        require(fine, "mixture must be from 0 (forward KL) to 1 (reverse KL)", self.mixture)
        require(self.temperature > 0, "temperature must be positive", self.temperature)

    def __call__(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        with torch.no_grad():  # first, while the model has saved nothing for its backward
            theirs = models[TEACHER](**inputs).logits
        ours = models["model"](**inputs).logits

        counts = batch["labels"][:, 1:] != IGNORED_LABEL
        divergences = by_token(self._divergence, ours, theirs)[:, :-1]
        loss: torch.Tensor = (divergences * counts).sum() / counts.sum()
        return loss

    def _divergence(self, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Of logits [tokens, vocabulary] from the teacher's ones, [tokens]."""
        import torch

        shared = min(ours.shape[-1], theirs.shape[-1])
        ours = (ours[:, :shared].float() / self.temperature).log_softmax(dim=-1)
        theirs = (theirs[:, :shared].float() / self.temperature).log_softmax(dim=-1)

        share = self.mixture
        if share == 0:
            return _kl(theirs, ours)
        if share == 1:
            return _kl(ours, theirs)

        mixed = torch.logaddexp(ours + math.log1p(-share), theirs + math.log(share))
        return share * _kl(theirs, mixed) + (1 - share) * _kl(ours, mixed)


def _kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """KL(of || to) of log-probabilities [tokens, vocabulary], [tokens]."""
    import torch

    return torch.nn.functional.kl_div(to, of, reduction="none", log_target=True).sum(dim=-1)
