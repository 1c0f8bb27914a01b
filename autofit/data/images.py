"""Images as training data: a saved .pt of tensors, or a folder with one directory of image files for each class."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from autofit.core.errors import InputError
from autofit.data.labels import LabelRule, Labels, labels_from
from autofit.data.options import DataOptions
from autofit.data.rows import not_there
from autofit.data.samples import Pictures, Stacked
from autofit.data.tokens import cached_map

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by number of channels


def read_tensors(path: Path, shape: Sequence[int], rule: LabelRule) -> Stacked:
    """The `pixel_values` and `labels` that a .pt file holds.

    Args:
        shape: of an image, as the model takes it: channels, height, width.

    Raises:
        InputError: no such file, not one of tensors, or tensors that do not suit the model.
    """
    try:
        data = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise not_there(path) from error
    except Exception as error:  # of a file that is none it raises whatever it stumbles over, and pages of advice
        reason = type(error).__name__
        remedy = "Give what torch.save wrote, or a folder with a directory of images for each class."
        raise InputError(f"the data file {path} cannot be read: {reason}.", remedy) from error
    names = ("pixel_values", "labels")
    if not isinstance(data, dict) or not all(isinstance(data.get(name), torch.Tensor) for name in names):
        raise InputError(f"the data file {path} must hold pixel_values and labels.", "Save a dict of two tensors.")
    pixels, labels = data["pixel_values"], data["labels"]
    # Convolutional networks take any height and width; a model that does not says so itself when its loss is tried.
    if pixels.dim() != 4 or pixels.shape[1] != shape[0] or not len(pixels):
        given, wanted = (" x ".join(map(str, each)) for each in (pixels.shape, ("N", *shape)))
        raise InputError(f"{path}: pixel_values are {given}, but the model takes {wanted}.", "Convert the images.")
    if labels.shape != pixels.shape[:1]:
        message = f"{path}: {len(pixels)} images have labels of shape {tuple(labels.shape)}."
        raise InputError(message, "Give one label for each image.")
    places = [f"{path}, label {number}" for number in range(1, len(labels) + 1)]
    return Stacked({"pixel_values": pixels, "labels": labels_from(labels.tolist(), places, rule).numbers})


def read_folder(path: Path, shape: Sequence[int], options: DataOptions) -> tuple[Pictures, Labels]:
    """The images of a folder, whose directories are the classes; resized to the shape that the model takes.

    Raises:
        InputError: Pillow is missing, no image in it, one that cannot be read, or classes the model does not have.
    """
    if importlib.util.find_spec("PIL") is None:
        message = f"{path} holds image files, which Pillow reads, and it is not installed."
        raise InputError(message, "Install it (pip install pillow), or save the images as tensors in a .pt file.")
    channels, height, width = shape
    if channels not in _MODES:
        message = f"the model takes images of {channels} channels, which image files do not have."
        raise InputError(message, "Save the images as tensors in a .pt file.")
    files = _files(path)
    names, paths = [file.relative_to(path).parts[0] for file in files], [str(file) for file in files]
    labels = labels_from(names, paths, options.labels)
    decoded = cached_map(
        {"file": paths, "stamp": [_stamp(file) for file in files]},
        _Decoder(_MODES[channels], height, width),
        features={"pixels": datasets.Value("binary")},
        key=tuple(shape),
        progress="Reading images" if options.progress else None,
    )
    mean, deviation = options.normalisation.tensors(channels)
    pixels = decoded.data.column("pixels")
    return Pictures(pixels, labels.numbers, (channels, height, width), mean, deviation), labels


def _files(path: Path) -> list[Path]:
    """All files in the directories of a folder, but for hidden ones."""
    found = sorted(file for file in path.glob("*/**/*") if file.is_file())
    files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        message = f"the folder {path} holds no directories with images."
        raise InputError(message, "Make one directory for each class, and put its images there.")
    return files


def _stamp(file: Path) -> str:
    """What changes when a file does, without reading it."""
    stat = file.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


@dataclass(frozen=True)
class _Decoder:
    """File names -> pixels as bytes, [channels, height, width]."""

    mode: str
    height: int
    width: int

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixels": [self._pixels(file) for file in rows["file"]]}

    def _pixels(self, file: str) -> bytes:
        # By name, because type checkers are run where Pillow is not installed, too.
        image_module, operations = (importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageOps"))
        try:
            with image_module.open(file) as image:
                upright = operations.exif_transpose(image).convert(self.mode)
                resized = upright.resize((self.width, self.height), image_module.Resampling.BILINEAR)
        except Exception as error:  # of a broken file Pillow raises whatever it stumbles over
            reason = type(error).__name__
            raise InputError(f"the image {file} cannot be read: {reason}.", "Repair or remove it.") from error
        pixels = np.asarray(resized).reshape(self.height, self.width, -1)
        return pixels.transpose(2, 0, 1).tobytes()
