"""Models, loaders and the call that tests of `fit` share."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autofit
from autofit.api.fit import fit
from autofit.training.loop import StepReport
from tests import tiny

Batch = tuple[torch.Tensor, torch.Tensor]
# What a search needs at least, so that few configs are predicted and probed.
NARROW: dict[str, Any] = {
    "precision": "fp32",
    "optimizer": "adamw",
    "compile": "none",
    "optimizer_in_backward": False,
    **dict.fromkeys(("activation_offload", "optimizer_offload", "parameter_offload"), "none"),
}


def batches(count: int = 3, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(size, 48, generator=generator),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def mlp(depth: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return tiny.MLP(depth=depth)


def fitted(model: nn.Module | None = None, loader: Any = None, **options: Any) -> autofit.Trained:
    """Training only, on the CPU, with every knob off unless the config says otherwise."""
    given = {"loss": tiny.classify, "lr": 1e-2, "config": {}, "device": "cpu", **options}
    return fit(mlp() if model is None else model, batches() if loader is None else loader, **given)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], **tolerance: float
) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name
        )


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Every sample is told from all others in the batch."""
    vectors = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(vectors @ vectors.T * 5, torch.arange(len(vectors)))


class Noisy(nn.Module):
    """Draws random numbers in every forward, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features)


def noisy() -> nn.Module:
    torch.manual_seed(2)
    return Noisy()


def shuffled() -> DataLoader[Any]:
    features, classes = (torch.cat(parts) for parts in zip(*batches(3), strict=True))
    return DataLoader(TensorDataset(features, classes), batch_size=8, shuffle=True)


class StoppedError(Exception):
    """Something from outside ends a training run."""


def stop_at(step: int) -> Callable[[StepReport], None]:
    def callback(report: StepReport) -> None:
        if report.step == step + 1:
            raise StoppedError

    return callback
