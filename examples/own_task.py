"""A task of one's own: a small network learns to say what a larger, frozen one says, and to rank a batch as it does.

A loss over several models gets them by name. What it needs of all samples of a batch at once, it says by two methods:
`represent`, what stands for each sample, and `of_representations`, the loss of those. A batch is then split into
micro-batches although its loss compares all of its samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit

FEATURES, VECTOR = 32, 16


class Encoder(nn.Module):
    """Vectors of one length for whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, VECTOR)

    def forward(self, features: Tensor) -> Tensor:
        vectors: Tensor = self.head(self.layers(features))
        return functional.normalize(vectors, dim=-1)


@dataclass(frozen=True)
class SameRanking:
    """How alike two samples are should be what the teacher says (similarity-preserving distillation,
    arXiv:1907.09682)."""

    temperature: float = 0.1

    def __call__(self, models: dict[str, Any], batch: Tensor) -> Tensor:
        return self.of_representations(self.represent(models, batch))

    def represent(self, models: dict[str, Any], batch: Tensor) -> Tensor:
        """The vectors of both models, [samples, 2, VECTOR]."""
        with torch.no_grad():
            theirs = models["teacher"](batch)
        return torch.stack([models["model"](batch), theirs], dim=1)

    def of_representations(self, vectors: Tensor) -> Tensor:
        ours, theirs = vectors.unbind(dim=1)
        found = (ours @ ours.T / self.temperature).log_softmax(dim=1)
        wanted = (theirs @ theirs.T / self.temperature).log_softmax(dim=1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def main() -> autofit.Trained:
    """Train in micro-batches of 8 what a batch of 64 asks for."""
    torch.manual_seed(0)
    teacher = Encoder(width=128)
    loader = [torch.randn(64, FEATURES) for _ in range(20)]
    trained = autofit.fit(
        Encoder(width=32),
        loader,
        loss=SameRanking(),
        frozen={"teacher": teacher},
        config={"micro_batch_size": 8},
        device="cpu",
        lr=3e-3,
        epochs=4,
    )
    print(trained)
    return trained


if __name__ == "__main__":
    main()
