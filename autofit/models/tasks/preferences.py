"""Pairs of texts, the better one first, each a prompt with an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError
from autofit.core.task import IGNORED_LABEL
from autofit.core.workload import REFERENCE
from autofit.models.losses import LOSSES
from autofit.models.tasks.image_text import RandomImageText, image_text_batches
from autofit.models.tasks.sizes import YOUR_FUNCTION, Asked, padding, positions
from autofit.models.tasks.text import SEED, random_ids

if TYPE_CHECKING:
    import torch

_LONGEST = 1024  # tokens of a text unless given: TRL's default for preferences


@dataclass(frozen=True)
class RandomPreferences:
    """n -> n pairs of random texts, `input_ids`, `attention_mask` and `labels`
    [n, 2, sequence_length]; the first half of each is the prompt.

    `loss` is what they are trained with; where that asks the model before training, what it says of
    them is there, too, and where answers are good or bad by themselves, every second one is
    `desirable`.

    With an `image` in each text, as `RandomImageText` makes it, its pixels are
    [n, 2, patches, values] or [n, 2, channels, height, width]."""

    sequence_length: int
    vocab_size: int
    pad_token_id: int | None
    loss: Any
    are_single: bool = False
    image: RandomImageText | None = None

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        shape = (n, 2, self.sequence_length)
        ids = random_ids(shape, self.vocab_size, self.pad_token_id, generator)

        of_image: dict[str, torch.Tensor] = {}
        if self.image is not None:
            of_image = self._with_images(n)
            ids = of_image.pop("input_ids")

        labels = of_image.pop("labels", ids).clone()
        labels[:, :, : self.sequence_length // 2] = IGNORED_LABEL
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
        }
        batch |= of_image
        if self.are_single:
            batch["desirable"] = torch.arange(n, device="cpu") % 2
        if hasattr(self.loss, "precomputed"):
            batch[REFERENCE] = torch.zeros(n, 2, device="cpu")

        return batch

    def _with_images(self, n: int) -> dict[str, torch.Tensor]:
        """Two texts with an image for each sample, side by side."""
        assert self.image is not None
        found = {}
        for name, tensor in self.image(2 * n).items():
            shape = [n, 2]
            if name == "pixel_values" and self.image.grid is not None:
                shape.append(-1)
            found[name] = tensor.unflatten(0, shape)

        return found


def preference_batches(asked: Asked) -> RandomPreferences:
    """The batches of a model that learns preferences, by its config."""
    text = asked.config.get_text_config()
    vocabulary = asked.size(text, "vocab_size")
    most = positions(text)
    usual = min(_LONGEST, most or _LONGEST)
    length = usual
    if asked.sequence_length is not None:
        length = asked.length(most, 2)
    loss = LOSSES[asked.task.name]()
    are_single = asked.task.labels == "good or bad"
    image = None
    if asked.sees:
        image = _image(replace(asked, sequence_length=length))

    return RandomPreferences(
        length,
        vocabulary,
        padding(text, vocabulary),
        loss,
        are_single,
        image,
    )


def _image(asked: Asked) -> RandomImageText:
    """What makes texts with an image each."""
    found = image_text_batches(asked)
    if not isinstance(found, RandomImageText):
        raise InputError(f"{asked.name} reads images apart from texts.", YOUR_FUNCTION)

    return found
