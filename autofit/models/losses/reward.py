"""Reward models: the better of two texts gets the higher score (Bradley and Terry 1952; Ouyang et
al. 2022, arXiv:2203.02155, equation 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.tasks.reward import REWARD as TASK
from autofit.models.losses.preference import inputs_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reward:
    """(model, batch) -> the mean loss over pairs of a better and a worse text.

    The model gives a number for each text, [texts, 1], or for each token, [texts, tokens], of which
    that of the last one counts.

    Args:
        center: the weight of the squared sum of both scores, which keeps them around zero
            (arXiv:2312.09244).

    Raises:
        InputError: for a value that it does not take.
    """

    center: float = 0.0

    task: ClassVar[str] = TASK.name

    def __post_init__(self) -> None:
        require(self.center >= 0, "center must not be negative", self.center)

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        inputs = inputs_of(batch)
        scores = model(**inputs).logits
        if scores.shape[1] > 1:
            scores = scores.gather(1, inputs["attention_mask"].sum(dim=1, keepdim=True) - 1)
        scores = scores.float().squeeze(-1)
        better, worse = scores.unflatten(0, (-1, 2)).unbind(dim=1)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        if self.center:
            loss = loss + self.center * ((better + worse) ** 2).mean()

        return loss
