"""A convolutional network with BatchNorm, described by a Workload: search first, train later with what was found.

A Workload needs no data set: a factory of the model and a factory of batches of the largest shape say all that memory
and speed depend on.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autofit

CLASSES, SIZE, WIDTH, BATCH_SIZE = 4, 24, 32, 64


def block() -> nn.Module:
    """BatchNorm normalises by the mean and variance of the samples that go through the model together."""
    return nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
    )


class ConvNet(nn.Module):
    """Images [n, 3, 24, 24] to the scores of 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes, and how many of them there are: 1, 2, 3 or 4 light ones."""
    classes = torch.randint(CLASSES, (samples,))
    place = torch.linspace(0, 2 * torch.pi, SIZE)
    waves = torch.sin((classes[:, None] + 1) * place + 2 * torch.pi * torch.rand(samples, 1))
    images = waves[:, None, None, :].expand(-1, 3, SIZE, -1)
    return images + torch.randn(samples, 3, SIZE, SIZE), classes


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the samples."""
    images, classes = batch
    return nn.functional.cross_entropy(model(images), classes)


def main(steps: int = 40, trials: int = 6) -> tuple[autofit.Result, autofit.Trained]:
    """Search within 8 MiB, then train."""
    workload = autofit.Workload(
        model=ConvNet, batch=make_batch, loss=loss, effective_batch_size=BATCH_SIZE, name="convnet"
    )
    result = autofit.search(
        workload,
        device="cpu",
        mem=8 / 1024,
        set={
            "precision": "fp32",
            "micro_batch_size": [8, 16, 32, 64],
            "optimizer": "adamw",
            "attention": "sdpa",
        },
        trials=trials,
    )
    print(autofit.explain(result))
    for warning in result.best.warnings:  # what is not the same as with the whole batch at once
        print(f"warning: {warning}")

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*make_batch(1024)), batch_size=BATCH_SIZE, shuffle=True)
    trained = autofit.fit(
        ConvNet(), loader, loss=loss, config=result.best.config, device="cpu", lr=3e-3, steps=steps
    )
    print(
        f"loss: {trained.history[0].loss:.2f} -> {trained.history[-1].loss:.2f} in {len(trained.history)} steps"
    )
    return result, trained


if __name__ == "__main__":
    main()
