"""Texts with a label each or none, of several in a sample or with an image in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autofit.core.errors import InputError
from autofit.core.workload import Rows
from autofit.models.tasks.image_text import RandomImageText, image_text_batches
from autofit.models.tasks.sizes import YOUR_FUNCTION, Asked
from autofit.models.tasks.text import SEED, ClassLabels, RandomTokens, class_labels, text_batches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RandomTexts:
    """n -> n samples of one text each, and their labels.

    Of several texts, what the model reads is [n, texts, ...] and `labels` are [n, texts]: 1 of each
    sample's first text, 0 of the others. Without labels the texts are alone.
    """

    source: RandomTokens | RandomImageText
    sequence_length: int
    labels: ClassLabels | None
    texts: int = 1

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        batch = dict(self.source(n * self.texts))
        batch.pop("labels")
        if self.texts == 1 and self.labels is not None:
            generator = torch.Generator(device="cpu").manual_seed(SEED)
            return {**batch, "labels": self.labels(n, generator)}

        has_patches = isinstance(self.source, RandomImageText) and self.source.grid is not None
        found = {}
        for name, tensor in batch.items():
            shape = [n, self.texts]
            if name == "pixel_values" and has_patches:
                shape.append(-1)
            found[name] = tensor.unflatten(0, shape)

        if self.labels is not None:
            found["labels"] = torch.zeros(n, self.texts, device="cpu")
            found["labels"][:, 0] = 1

        return Rows(found)


def several_texts(asked: Asked) -> RandomTexts:
    """The batches of a model that scores, classifies or embeds texts, by its config."""
    labels: ClassLabels | None = ClassLabels(1, "regression")
    if asked.task.classifies:
        labels = class_labels(asked.config)
    elif asked.task.labels == "none":
        labels = None

    if not asked.sees:
        of_texts = text_batches(asked)
        return RandomTexts(of_texts, of_texts.sequence_length, labels, asked.texts)

    of_images = image_text_batches(asked)
    if not isinstance(of_images, RandomImageText):
        raise InputError(f"{asked.name} reads images apart from texts.", YOUR_FUNCTION)
    return RandomTexts(of_images, of_images.sequence_length, labels, asked.texts)
