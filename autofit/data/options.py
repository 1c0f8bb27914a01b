"""What a user or a model says about how data is to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autofit.data.labels import LabelRule


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel, or of all, of values from 0 to 1."""

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)

    def tensors(self, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation, [channels]."""
        mean, deviation = (torch.tensor(each).expand(channels) for each in (self.mean, self.deviation))
        return mean, deviation


@dataclass(frozen=True)
class DataOptions:
    """How a file is read.

    Args:
        packing: samples one after the other, cut to the sequence length, or one by one and padded; None: packing for
            plain text, padding for all else.
        labels: what the model says about its classes.
        progress: show a bar on stderr.
    """

    packing: bool | None = None
    labels: LabelRule = field(default_factory=LabelRule)
    normalisation: Normalisation = field(default_factory=Normalisation)
    progress: bool = False
