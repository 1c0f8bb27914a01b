"""Training of sentence-transformers with its own losses, on an encoder that is made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import autofit

BATCH, LENGTH, VOCABULARY = 4, 32, 512
# The losses of sentence-transformers by the number of texts in a sample, and what else a sample holds.
LOSSES: dict[str, tuple[int, Callable[[int], Tensor] | None]] = {
    "MultipleNegativesRankingLoss": (2, None),
    "TripletLoss": (3, None),
    "CosineSimilarityLoss": (2, lambda n: torch.rand(n)),
    "ContrastiveLoss": (2, lambda n: torch.arange(n) % 2),
    "SoftmaxLoss": (2, lambda n: torch.arange(n) % 3),
    "BatchAllTripletLoss": (1, lambda n: torch.arange(n) % 2),
}
NAMES = tuple(LOSSES)


class Encoder(nn.Module):
    """A BERT as one of sentence-transformers' modules: what it makes of a text is kept among the features."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
        self.auto_model = BertModel(config, add_pooling_layer=False)

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        answer = self.auto_model(features["input_ids"], features["attention_mask"])
        return {**features, "token_embeddings": answer.last_hidden_state}


def __getattr__(name: str) -> Callable[[], autofit.Workload]:
    """The function of a loss, by its name in sentence-transformers."""
    if name not in LOSSES:
        raise AttributeError(name)
    return lambda: _workload(name)


def _workload(name: str) -> autofit.Workload:
    texts, labels = LOSSES[name]

    def model() -> Any:
        encoder = SentenceTransformer(modules=[Encoder(), Pooling(64)], device="cpu")
        options = (
            {"sentence_embedding_dimension": 64, "num_labels": 3} if name == "SoftmaxLoss" else {}
        )
        return getattr(losses, name)(encoder, **options)

    def batch(n: int) -> dict[str, Any]:
        ids = [torch.randint(VOCABULARY, (n, LENGTH)) for _ in range(texts)]
        features = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
        return {"features": features, "labels": labels(n) if labels else torch.zeros(n)}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model([dict(each) for each in batch["features"]], batch["labels"])

    return autofit.Workload(model=model, batch=batch, loss=loss, effective_batch_size=BATCH)
