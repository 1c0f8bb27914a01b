"""Cross-encoders: a query and a passage are read together, and get one score (Nogueira and Cho
2019, arXiv:1901.04085)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import InputError, require
from autofit.core.tasks.rerank import RERANK as TASK
from autofit.models.losses.preference import inputs_of

if TYPE_CHECKING:
    import torch

KINDS = ("pointwise", "listwise")


@dataclass(frozen=True)
class Rerank:
    """(model, batch) -> the mean loss over queries with passages.

    A sample is one text, a query with a passage: `labels` are [samples], from 0 to 1. Or it is a
    query with several passages, a text each: `input_ids` are [samples, texts, tokens] and `labels`
    [samples, texts].

    Args:
        positive_weight: of pairs that belong together, where there are few of them; of `pointwise`.
        kind: `pointwise`, the binary cross-entropy of each text; `listwise`, the cross-entropy of a
            query's first passage among all of its passages (arXiv:2101.08751, section 3).

    Raises:
        InputError: for a value that it does not take.
    """

    positive_weight: float = 1.0
    kind: str = "pointwise"

    task: ClassVar[str] = TASK.name

    def __post_init__(self) -> None:
        require(
            self.positive_weight > 0,
            "positive_weight must be positive",
            self.positive_weight,
        )
        require(
            self.kind in KINDS,
            f"kind must be one of {', '.join(KINDS)}",
            self.kind,
        )

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        labels = batch["labels"]
        scores = self.scores(model, batch).float().view(labels.shape)
        if self.kind == "listwise":
            if labels.dim() != 2:
                message = "a listwise loss takes several passages for each query."
                raise InputError(message, "Give labels of [samples, texts], or kind='pointwise'.")

            first = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
            return torch.nn.functional.cross_entropy(scores, first)

        loss: torch.Tensor = torch.nn.functional.binary_cross_entropy_with_logits(
            scores,
            labels.to(scores.dtype),
            pos_weight=scores.new_tensor(self.positive_weight),
        )

        return loss

    def scores(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The score of each text, [texts]."""
        scores: torch.Tensor = model(**texts_of(batch)).logits.squeeze(-1)
        return scores


def texts_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward takes of a batch: all texts one below the other."""
    if batch["labels"].dim() == 2:
        return inputs_of(batch)
    return {name: tensor for name, tensor in batch.items() if name != "labels"}
