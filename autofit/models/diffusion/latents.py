"""Synthetic latents of pictures and videos, with noise, timesteps and the conditions of a denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autofit.models.diffusion.denoisers import TRAIN_STEPS
from autofit.models.tasks.text import SEED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RandomLatents:
    """n -> a batch of n samples for `losses.Diffusion`.

    Attributes:
        shape: of a sample's latents: channels, frames of a video, rows, columns.
        conditions: the shape of each condition of a sample, by its name.
        height, width: of a picture, in pixels.
        flows: whether timesteps are those of flow matching, which are no whole numbers.
        shift: by which flow matching draws more noise the larger it is.
        train_steps: from which other timesteps are drawn.
        vocabularies: of the conditions that are tokens, how many different ones there are, by name.
    """

    shape: tuple[int, ...]
    conditions: Mapping[str, tuple[int, ...]]
    height: int
    width: int
    flows: bool
    shift: float = 1.0
    train_steps: int = TRAIN_STEPS
    vocabularies: Mapping[str, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of each prompt, encoded or not."""
        for name in ("encoder_hidden_states", *self.vocabularies):
            if name in self.conditions:
                return self.conditions[name][0]
        raise KeyError("encoder_hidden_states")

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu")

        batch = {"latents": draw(n, *self.shape)}
        batch |= self.noise(batch, generator)
        for name, shape in self.shapes().items():
            if name in self.vocabularies:
                most = self.vocabularies[name]
                batch[name] = torch.randint(most, (n, *shape), generator=generator, device="cpu")
            elif name != "latents":
                batch[name] = draw(n, *shape)
        return batch | self.told(n)

    def noise(
        self, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """Noise for the latents of a batch, and how much of it: `noise` and `timesteps`."""
        import torch

        shape = batch["latents"].shape
        noise = torch.randn(shape, generator=generator, device="cpu")
        drawn = timesteps(shape[0], generator, self.flows, self.shift, self.train_steps)
        return {"noise": noise, "timesteps": drawn}

    def told(self, n: int) -> dict[str, torch.Tensor]:
        """Those conditions of n samples that follow from the sizes of the pictures, or are constant."""
        import torch

        told = {}
        if "time_ids" in self.conditions:  # as it was, uncropped, as it is
            whole = [self.height, self.width, 0, 0, self.height, self.width]
            told["time_ids"] = torch.tensor([whole] * n, dtype=torch.float32, device="cpu")
        if "guidance" in self.conditions:  # as diffusers' scripts train by default
            told["guidance"] = torch.ones(n, device="cpu")
        return told

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a file holds of a sample, by name: all but what is drawn or told."""
        told = ("time_ids", "guidance")
        stored = {name: shape for name, shape in self.conditions.items() if name not in told}
        return {"latents": self.shape, **stored}


def timesteps(
    n: int, generator: torch.Generator, flows: bool, shift: float, train_steps: int
) -> torch.Tensor:
    """n timesteps: uniform whole numbers below `train_steps`; for flow matching, from 0 to 1000 by
    the logistic of normal numbers (arXiv:2403.03206, section 3.1), shifted (section 5.3.2)."""
    import torch

    if not flows:
        return torch.randint(train_steps, (n,), generator=generator, device="cpu")
    share = torch.randn(n, generator=generator, device="cpu").sigmoid()
    return TRAIN_STEPS * shift * share / (1 + (shift - 1) * share)
