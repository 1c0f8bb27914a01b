"""Synthetic images and videos, and the labels of the tasks that are trained on them; all as the
factories of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError, shown
from autofit.models.tasks.sizes import Asked
from autofit.models.tasks.text import SEED, ClassLabels, RandomTokens, class_labels, text_batches

if TYPE_CHECKING:
    import torch

_BOXES = 8  # of an image; COCO has 7.7 on average (arXiv:1405.0312, section 5)
_FRAMES = 16


@dataclass(frozen=True)
class RandomImages:
    """n -> normally distributed pixels [n, channels, height, width] and class labels."""

    channels: int
    height: int
    width: int
    labels: ClassLabels

    def __call__(self, n: int) -> dict[str, Any]:
        generator, pixels = _pixels(n, self.channels, self.height, self.width)
        return {"pixel_values": pixels, "labels": self.targets(n, generator)}

    def targets(self, n: int, generator: torch.Generator) -> Any:
        """What the model is to tell of n samples."""
        return self.labels(n, generator)


@dataclass(frozen=True)
class RandomSegments(RandomImages):
    """n -> pixels [n, channels, height, width] and the class of each [n, height, width]."""

    def targets(self, n: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        shape = (n, self.height, self.width)
        return torch.randint(self.labels.classes, shape, generator=generator, device="cpu")


def _boxes(batch: Any) -> int:
    """The boxes of all images of a batch, over which losses of detection are a mean."""
    return sum(len(image["class_labels"]) for image in batch["labels"])


@dataclass(frozen=True)
class RandomBoxes(RandomImages):
    """n -> pixels [n, channels, height, width] and a dict for each image: its boxes [8, 4], as
    centre, width and height in shares of the image, and the class of each [8]."""

    count = staticmethod(_boxes)

    def targets(self, n: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
        import torch

        targets = []
        for _ in range(n):
            classes = torch.randint(
                self.labels.classes,
                (_BOXES,),
                generator=generator,
                device="cpu",
            )
            centres = torch.rand((_BOXES, 2), generator=generator, device="cpu") / 2 + 0.25
            sides = torch.rand((_BOXES, 2), generator=generator, device="cpu") / 4 + 0.125
            targets.append(
                {
                    "class_labels": classes,
                    "boxes": torch.cat([centres, sides], dim=1),
                }
            )

        return targets


@dataclass(frozen=True)
class RandomPatches(RandomImages):
    """n -> a square of patches of images, in rows: [n, patches, values of a patch], and how many a
    side has."""

    side: int = 1  # patches in a row; height and width are those of a patch

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        patches = self.side * self.side
        generator, pixels = _pixels(
            n,
            patches,
            self.channels * self.height * self.width,
        )
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": torch.ones((n, patches), dtype=torch.long, device="cpu"),
            "spatial_shapes": torch.full((n, 2), self.side, device="cpu"),
            "labels": self.targets(n, generator),
        }


@dataclass(frozen=True)
class RandomVideos(RandomImages):
    """n -> normally distributed pixels [n, frames, channels, height, width] and class labels."""

    frames: int = _FRAMES
    name: str = "pixel_values"  # of the argument that takes them

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        generator, pixels = _pixels(n, self.frames, self.channels, self.height, self.width)
        return {self.name: pixels, "labels": self.targets(n, generator)}


def _pixels(*shape: int) -> tuple[torch.Generator, torch.Tensor]:
    import torch

    generator = torch.Generator(device="cpu").manual_seed(SEED)
    return generator, torch.randn(shape, generator=generator, device="cpu")


def image_batches(asked: Asked) -> RandomImages | RandomTokens:
    """The batches of a model of images, by its config."""
    asked.no_length("images")
    # ImageGPT reads colours as words
    if "input_ids" in asked.arguments and "pixel_values" not in asked.arguments:
        return text_batches(replace(asked, arguments=()))

    vision = getattr(asked.config, "vision_config", asked.config)  # of models of text, too
    channels = image_channels(asked, vision)
    labels = class_labels(asked.config)
    if "spatial_shapes" in asked.arguments:
        size = asked.size(vision, "patch_size")
        patches = asked.size(vision, "num_patches")
        return RandomPatches(channels, size, size, labels, side=math.isqrt(patches))

    height, width = image_sides(asked, vision)
    if asked.task.medium == "videos":
        frames = asked.size(vision, "num_frames", "frames_per_clip", default=_FRAMES)
        names = [name for name in asked.arguments if name.startswith("pixel_values")]
        names.append("pixel_values")
        return RandomVideos(channels, height, width, labels, frames, name=names[0])

    kind = RandomImages
    if asked.task.labels == "class of each pixel":
        kind = RandomSegments
    elif asked.task.labels == "boxes":
        kind = RandomBoxes
    return kind(channels, height, width, labels)


def image_sides(asked: Asked, vision: Any) -> tuple[int, int]:
    """The height and width of the images that a config is for.

    Raises:
        InputError: the config says something else by their key.
    """
    given: Any = getattr(vision, "image_size", None) or getattr(vision, "crop_size", None)
    given = given or asked.task.pixels
    if isinstance(given, Mapping):
        given = [given.get("height"), given.get("width")]

    sides = given
    if isinstance(given, int):
        sides = [given, given]

    is_known = isinstance(sides, list | tuple) and len(sides) == 2
    if not is_known or any(type(side) is not int or side < 1 for side in sides):
        message = f"the config of {asked.name} cannot have image_size {shown(given)}."
        raise InputError(message, "Correct config.json.")

    height, width = sides
    window = _window(vision)
    return height // window * window or window, width // window * window or window


def _window(vision: Any) -> int:
    """What the sides of an image must be multiples of: of RF-DETR, whose patches are in windows, 56
    pixels."""
    backbone = getattr(vision, "backbone_config", None)
    windows = getattr(backbone, "num_windows", None)
    patch = getattr(backbone, "patch_size", None)
    if not isinstance(windows, int) or not isinstance(patch, int):
        return 1
    if hasattr(backbone, "num_windows_side"):
        return 1
    return windows * patch


def image_channels(asked: Asked, vision: Any) -> int:
    """The channels of the images that a config is for: its own key, its backbone's, or 3."""
    keys = ("num_channels", "in_channels", "in_chans")
    backbone = getattr(vision, "backbone_config", None)
    owner = vision
    if backbone is not None and not any(hasattr(vision, key) for key in keys):
        owner = backbone
    return asked.size(owner, *keys, default=3)
