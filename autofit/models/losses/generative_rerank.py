"""Language models that rank: a query and a passage are read together, and the score is how much
more likely one word is than another as the next (Qwen3-Reranker, arXiv:2506.05176, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.tasks.generative_rerank import GENERATIVE_RERANK as TASK
from autofit.models.losses.last_token import at_last_token
from autofit.models.losses.rerank import Rerank, texts_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerativeRerank(Rerank):
    """(model, batch) -> the mean loss over queries, of the scores at the end of each text.

    Batches and options are those of `Rerank`; the model gives a number for each token.
    """

    task: ClassVar[str] = TASK.name

    def scores(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The score of each text, [texts]."""
        inputs = texts_of(batch)
        by_token = model(**inputs).logits

        return at_last_token(by_token, inputs.get("attention_mask")).squeeze(-1)
