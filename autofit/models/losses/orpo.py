"""Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691): no reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.task import IGNORED_LABEL
from autofit.core.tasks.orpo import ORPO as TASK
from autofit.models.losses.by_token import next_token_losses
from autofit.models.losses.preference import answer_tokens, inputs_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ORPO:
    """(model, batch) -> the mean loss over pairs of a better and a worse answer (equation 6).

    Its first term is a mean over all tokens of the better texts, prompts included, its second one a
    mean over pairs: `over_batch` counts both in the whole batch.

    Args:
        beta: the weight of the odds ratio (lambda in the paper).

    Raises:
        InputError: for a value that it does not take.
    """

    beta: float = 0.1

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.beta >= 0, "beta must not be negative", self.beta)

    def over_batch(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The tokens of better texts that are predicted, and the pairs, [2]."""
        import torch

        tokens = _texts(batch)[:, 0, 1:] != IGNORED_LABEL
        pairs = torch.full((), len(tokens), device=tokens.device)
        return torch.stack([tokens.sum(), pairs]).double()

    def __call__(
        self,
        model: Any,
        batch: Mapping[str, Any],
        over_batch: torch.Tensor,
    ) -> torch.Tensor:
        import torch

        logits = model(**inputs_of(batch)).logits
        losses = next_token_losses(logits, _texts(batch).flatten(0, 1))
        losses = losses.unflatten(0, (-1, 2))[:, :, :-1]

        tokens_per_pair = (over_batch[0] / over_batch[1]).to(losses.dtype)
        likelihood = losses[:, 0].sum() / (len(losses) * tokens_per_pair)

        is_answer = batch["labels"][:, :, 1:] != IGNORED_LABEL
        means = -(losses * is_answer).sum(dim=2) / answer_tokens(batch)
        better, worse = (means - _log_of_others(means)).unbind(dim=1)
        preference = torch.nn.functional.logsigmoid(better - worse).mean()
        loss: torch.Tensor = likelihood - self.beta * preference

        return loss


def _texts(batch: Mapping[str, Any]) -> torch.Tensor:
    """All tokens but padding as labels, [pairs, 2, tokens]."""
    ids: torch.Tensor = batch["input_ids"]
    if "attention_mask" in batch:
        ids = ids.masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)

    return ids


def _log_of_others(log_probabilities: torch.Tensor) -> torch.Tensor:
    """log(1 - p) of log p, exact also near 0 and 1 (Maechler 2012, "log1mexp")."""
    import torch

    half = -0.6931471805599453
    near_one = torch.log(-torch.expm1(log_probabilities))
    near_zero = torch.log1p(-torch.exp(log_probabilities))
    return torch.where(log_probabilities > half, near_one, near_zero)
