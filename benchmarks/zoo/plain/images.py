"""Networks on images, volumes and points: classifiers, and what makes images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit

WIDTH, SIDE, BATCH = 16, 32, 8
Batch = dict[str, Any]


def images(n: int) -> Batch:
    """Images and classes."""
    return {"x": torch.randn(n, 3, SIDE, SIDE), "y": torch.arange(n) % 10}


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the images."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def conv(inputs: int, outputs: int, stride: int = 1, norm: bool = True) -> nn.Sequential:
    """A convolution, its norm and its ReLU."""
    layers = [
        nn.Conv2d(inputs, outputs, 3, stride, 1),
        nn.BatchNorm2d(outputs) if norm else nn.Identity(),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


def resnet_of(blocks: int = 3) -> nn.Module:
    """A residual network of one width."""
    body = nn.Sequential(*(Residual() for _ in range(blocks)))
    return nn.Sequential(
        conv(3, WIDTH, 2), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)
    )


def lenet_of() -> nn.Module:
    """LeCun's network of 1998."""
    features = [
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    classifier = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *classifier)


class Mixer(nn.Module):
    """One block of an MLP-Mixer."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MixerClassifier(nn.Module):
    """Patches, mixers, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.blocks = nn.ModuleList(Mixer(16, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class UNet(nn.Module):
    """Two halvings and the way back with shortcuts; `time`: told how much noise there is, as a denoiser is."""

    def __init__(self, outputs: int, time: bool = False) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            conv(3, WIDTH),
            conv(WIDTH, 2 * WIDTH),
            conv(2 * WIDTH, 2 * WIDTH),
        )
        self.up1, self.up2 = conv(4 * WIDTH, WIDTH), conv(2 * WIDTH, WIDTH)
        self.head = nn.Conv2d(WIDTH, outputs, 1)
        self.time = (
            nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 2 * WIDTH)) if time else None
        )

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        low = self.middle(functional.max_pool2d(second, 2))
        if self.time is not None and noise is not None:
            low = low + self.time(noise)[:, :, None, None]
        low = self.up1(torch.cat([functional.interpolate(low, scale_factor=2), second], 1))
        return self.head(
            self.up2(torch.cat([functional.interpolate(low, scale_factor=2), first], 1))
        )


def masks(n: int) -> Batch:
    """Images and a class for each pixel."""
    return {"x": torch.randn(n, 3, SIDE, SIDE), "y": torch.randint(4, (n, SIDE, SIDE))}


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """How well the noise is told, which is drawn anew each time."""
    x = batch["x"]
    level, noise = torch.rand(len(x), 1, device=x.device), torch.randn_like(x)
    mixed = x * (1 - level)[:, :, None, None] + noise * level[:, :, None, None]
    return functional.mse_loss(model(mixed, level), noise)


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            conv(3, WIDTH, 2), conv(WIDTH, WIDTH, 2), nn.Flatten(), nn.Linear(1024, 64)
        )
        up = [
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
        ]
        self.decoder = nn.Sequential(nn.Linear(32, 1024), nn.Unflatten(1, (WIDTH, 8, 8)), *up)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    """Reconstruction and divergence."""
    made, mean, log_variance = model(batch["x"])
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
    return functional.mse_loss(made, batch["x"]) + 1e-3 * divergence


class Quantised(nn.Module):
    """A VQ-VAE: the nearest code of each place, and gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, WIDTH, 2), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1))
        self.codes = nn.Embedding(64, WIDTH)
        up = [
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
        ]
        self.decoder = nn.Sequential(*up)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.encoder(x).permute(0, 2, 3, 1)
        nearest = self.codes(
            torch.cdist(latent.flatten(0, 2), self.codes.weight).argmin(-1)
        ).view_as(latent)
        made = self.decoder((latent + (nearest - latent).detach()).permute(0, 3, 1, 2))
        return functional.mse_loss(made, x) + functional.mse_loss(nearest, latent.detach())


class Adversaries(nn.Module):
    """A generator and a discriminator, trained in one step by a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        up = [
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
            nn.Tanh(),
        ]
        self.generator = nn.Sequential(nn.Linear(32, 1024), nn.Unflatten(1, (WIDTH, 8, 8)), *up)
        norm = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.Sequential(
            norm(nn.Conv2d(3, WIDTH, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            norm(nn.Linear(4096, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(x), 32, device=x.device))
        real, made = self.discriminator(x), self.discriminator(Reversed.apply(made))
        return functional.softplus(-real).mean() + functional.softplus(made).mean()


class Reversed(torch.autograd.Function):
    """x; its gradient the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Points(nn.Module):
    """PointNet: every point alone, then the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x).amax(1))


def volumes_of() -> nn.Module:
    """Convolutions in three dimensions."""
    layers = [
        nn.Conv3d(1, 8, 3, 2, 1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.Conv3d(8, 16, 3, 2, 1),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 10))


class Detector(nn.Module):
    """A grid of boxes, each with a score."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, WIDTH, 2), conv(WIDTH, WIDTH, 2), conv(WIDTH, WIDTH, 2))
        self.head = nn.Conv2d(WIDTH, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).flatten(2).transpose(1, 2)


def boxed(n: int) -> Batch:
    """Images with a list of boxes for each, as collate functions of detectors give them."""
    return {
        "x": torch.randn(n, 3, SIDE, SIDE),
        "y": [{"boxes": torch.rand(2, 4)} for _ in range(n)],
    }


def box_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The nearest prediction of each box, image by image."""
    losses = []
    for found, wanted in zip(model(batch["x"]), batch["y"], strict=True):
        distance = torch.cdist(found[:, :4], wanted["boxes"], p=1)
        hit = torch.zeros(len(found), device=found.device).scatter(0, distance.argmin(0), 1.0)
        losses.append(
            distance.amin(0).mean() + functional.binary_cross_entropy_with_logits(found[:, 4], hit)
        )
    return torch.stack(losses).mean()


def _workload(
    model: Callable[[], nn.Module], batch: Any = images, loss: Any = class_loss
) -> autofit.Workload:
    return autofit.Workload(model=model, batch=batch, loss=loss, effective_batch_size=BATCH)


def _own(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"])


def resnet() -> autofit.Workload:
    return _workload(resnet_of)


def lenet() -> autofit.Workload:
    return _workload(lenet_of)


def mlp_mixer() -> autofit.Workload:
    return _workload(MixerClassifier)


def unet() -> autofit.Workload:
    return _workload(lambda: UNet(4), masks)


def diffusion() -> autofit.Workload:
    return _workload(lambda: UNet(3, time=True), loss=denoising_loss)


def variational_autoencoder() -> autofit.Workload:
    return _workload(Variational, loss=elbo)


def vq_vae() -> autofit.Workload:
    return _workload(Quantised, loss=_own)


def gan() -> autofit.Workload:
    return _workload(Adversaries, loss=_own)


def pointnet() -> autofit.Workload:
    return _workload(Points, lambda n: {"x": torch.randn(n, 128, 3), "y": torch.arange(n) % 10})


def volumes() -> autofit.Workload:
    return _workload(
        volumes_of, lambda n: {"x": torch.randn(n, 1, 16, 16, 16), "y": torch.arange(n) % 10}
    )


def detector() -> autofit.Workload:
    return _workload(Detector, boxed, box_loss)
