"""A plain nn.Module with a loss of its own: any iterable of batches will do, and so will any loss.

The task is to say in which of 8 hidden clusters a point of 64 dimensions lies.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autofit

FEATURES, CLASSES, WIDTH, DEPTH = 64, 8, 128, 4


class Residual(nn.Module):
    """x + f(x). A list of equal blocks is what activation checkpointing looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Classifier(nn.Module):
    """Features [n, 64] to the scores of 8 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(DEPTH))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = self.enter(features)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the samples, as one number. autofit checks before it starts that it can be split into slices."""
    features, classes = batch
    return nn.functional.cross_entropy(model(features), classes)


def make_data(samples: int) -> TensorDataset:
    """Points around the 8 centres; the noise is three times as wide as the centres are spread."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    classes = torch.randint(CLASSES, (samples,))
    return TensorDataset(centres[classes] + 3 * torch.randn(samples, FEATURES), classes)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The fraction of points whose cluster is found."""
    features, classes = data.tensors
    model.eval()
    return float((model(features).argmax(dim=1) == classes).float().mean())


def main(steps: int = 100, trials: int = 6) -> tuple[autofit.Trained, float, float]:
    """Search, train, and compare the accuracy before and after."""
    torch.manual_seed(0)
    model, unseen = Classifier(), make_data(1024)
    before = accuracy(model, unseen)
    trained = autofit.fit(
        model,
        DataLoader(make_data(8192), batch_size=256, shuffle=True),
        loss=loss,
        device="cpu",
        mem=1,
        space="exact",  # the mathematics of plain fp32 training; only the way there may differ
        set={"micro_batch_size": [32, 64, 128, 256], "optimizer": "adamw"},
        trials=trials,
        lr=1e-3,
        steps=steps,
    )
    after = accuracy(trained.model, unseen)  # trained.model is `model` itself, changed in place
    print(autofit.explain(trained.result))
    print(f"accuracy on unseen points: {before:.0%} -> {after:.0%}")
    return trained, before, after


if __name__ == "__main__":
    main()
