"""Cross-encoders: a query and a passage are read together, and get one score (Nogueira and Cho 2019,
arXiv:1901.04085)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import require
from autofit.core.tasks.rerank import RERANK as TASK

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rerank:
    """(model, batch) -> the mean binary cross-entropy over pairs of a query and a passage.

    A batch holds `labels` [samples], from 0 to 1, beside what the model reads.

    Args:
        positive_weight: of pairs that belong together, where there are few of them.

    Raises:
        InputError: for a value that it does not take.
    """

    positive_weight: float = 1.0

    task: ClassVar[str] = TASK.name

    def __post_init__(self) -> None:
        require(self.positive_weight > 0, "positive_weight must be positive", self.positive_weight)

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        scores = model(**inputs).logits.float().squeeze(-1)
        loss: torch.Tensor = torch.nn.functional.binary_cross_entropy_with_logits(
            scores,
            batch["labels"].to(scores.dtype),
            pos_weight=scores.new_tensor(self.positive_weight),
        )
        return loss
