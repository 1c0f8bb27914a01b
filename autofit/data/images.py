"""Images as training data: tensors in a .pt file, or a folder with a directory of image files for
each class."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from autofit.core.errors import InputError, pluralize, printable
from autofit.core.workload import Workload
from autofit.data.cached_map import Columns, cached_map
from autofit.data.columnar import MediaFile, Stored
from autofit.data.failures import failing_as, kind_of_error
from autofit.data.folders import is_litter
from autofit.data.labels import Labels, labels_from
from autofit.data.options import DataOptions, LabelRule
from autofit.data.samples import FileLoader, Pictures, Stacked

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by number of channels


def image_loader(workload: Workload, path: Path, options: DataOptions) -> FileLoader:
    """The loader of a .pt file or a folder of images, in the shape that the model takes."""
    size = workload.effective_batch_size
    pixels = workload.batch(1)["pixel_values"]
    shape = pixels.shape[1:]
    if not path.is_dir():
        tensors = read_tensors(path, shape, options.labels)
        return FileLoader(tensors, size)

    pictures, labels, notes = read_folder(path, shape, options)
    return FileLoader(pictures, size, notes=notes, label_names=labels.names)


def read_tensors(path: Path, shape: Sequence[int], rule: LabelRule) -> Stacked:
    """The `pixel_values` and `labels` in a .pt file.

    Args:
        shape: of an image that the model takes, [channels, height, width].

    Raises:
        InputError: the file does not hold them, or they do not fit the model.
    """
    remedy = "Give what torch.save wrote, or a folder with a directory of images for each class."
    problem = f"the data file {path} cannot be read"
    with failing_as(problem, remedy, reason=kind_of_error):
        data = torch.load(path, weights_only=True)  # which raises pages of advice

    pixels = None
    labels = None
    if isinstance(data, dict):
        pixels = data.get("pixel_values")
        labels = data.get("labels")
    if not isinstance(pixels, torch.Tensor) or not isinstance(labels, torch.Tensor):
        message = f"the data file {path} must hold pixel_values and labels."
        raise InputError(message, "Save a dict of two tensors.")

    # Convolutional networks take any height and width. A model that does not says so when its loss
    # is tried.
    if pixels.dim() != 4 or pixels.shape[1] != shape[0] or not len(pixels):
        given = " x ".join(map(str, pixels.shape))
        wanted = " x ".join(map(str, ("N", *shape)))
        message = f"{path}: pixel_values are {given}, but the model takes {wanted}."
        raise InputError(message, "Convert the images.")

    images = len(pixels)
    if labels.shape != (images,):
        message = f"{path}: {images} images have labels of shape {tuple(labels.shape)}."
        raise InputError(message, "Give one label for each image.")

    locations = [f"{path}, label {number + 1}" for number in range(images)]
    numbered = labels_from(labels.tolist(), locations, rule)
    return Stacked({"pixel_values": pixels, "labels": numbered.numbers})


def read_folder(
    path: Path,
    shape: Sequence[int],
    options: DataOptions,
) -> tuple[Pictures, Labels, tuple[str, ...]]:
    """The images of a folder whose directories are the classes.

    Args:
        shape: to which images are resized, [channels, height, width].

    Returns:
        The images, their classes, and notes on files that are no images.
    """
    check_pillow(path)
    channels, height, width = shape
    if channels not in _MODES:
        message = f"the model takes images of {channels} channels, which image files do not have."
        raise InputError(message, "Save the images as tensors in a .pt file.")

    names, others = _image_files(path)
    if not names:
        message = f"the folder {path} holds no directories with images."
        raise InputError(message, "Make one directory for each class, and put its images there.")

    files = [str(path / name) for name in names]
    labels = labels_from([name.parts[0] for name in names], files, options.labels)

    stamps = []  # by which a changed file is known without reading it
    for file in files:
        stat = Path(file).stat()
        stamps.append(f"{stat.st_size} {stat.st_mtime_ns}")

    def decode(rows: Columns) -> Columns:
        decoded = []
        for file in rows["file"]:
            pixels = _pixels(os.fsdecode(file), _MODES[channels], height, width)
            decoded.append(pixels)

        return {"pixels": decoded}

    decoded = cached_map(
        {"file": list(map(os.fsencode, files)), "stamp": stamps},
        decode,
        features={"pixels": datasets.Value("binary")},
        key=tuple(shape),
        progress="Reading images" if options.progress else None,
    )

    pictures = Pictures(
        decoded.data.column("pixels"),
        labels.numbers,
        (channels, height, width),
        mean=torch.tensor(options.normalisation.mean).expand(channels),
        deviation=torch.tensor(options.normalisation.deviation).expand(channels),
    )
    notes = []
    if others:
        count = pluralize(len(others), "file")
        first = printable(str(path / others[0]))
        notes.append(f"left out, no image: {count}, the first of them {first}.")

    return pictures, labels, tuple(notes)


def _image_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files in the directories of a folder, sorted and relative to it: images, and others."""
    images: list[Path] = []
    others: list[Path] = []
    for file in sorted(folder.glob("*/**/*")):
        name = file.relative_to(folder)
        if not file.is_file() or is_litter(name):
            continue

        if _is_image(file):
            images.append(name)
        else:
            others.append(name)

    return images, others


def _is_image(file: Path) -> bool:
    """Whether a file is named as an image, or is one without such a name."""
    from PIL import Image

    Image.init()
    kind = Image.registered_extensions().get(file.suffix.lower(), "")
    if kind in Image.OPEN and Image.MIME.get(kind, "").startswith("image/"):
        return True

    try:
        with Image.open(file) as image:
            return str(Image.MIME.get(image.format, "")).startswith("image/")
    except Exception:  # of a decoder, or of Pillow where none knows the file
        return False


def check_pillow(path: Path) -> None:
    """Raise InputError where image files cannot be read."""
    if importlib.util.find_spec("PIL") is None:
        message = f"{path} holds image files, which Pillow reads, and it is not installed."
        remedy = "Install it (pip install pillow), or save the images as tensors in a .pt file."
        raise InputError(message, remedy)


@contextlib.contextmanager
def opened_image(file: MediaFile, *, where: str = "") -> Iterator[Any]:
    """An image file, of which only the head is read.

    Args:
        where: it is named in the data, as "LOCATION: ", for messages.
    """
    from PIL import Image

    source = file.source() if isinstance(file, Stored) else file
    problem = f"{where}the image {file} cannot be read"
    failing = failing_as(problem, "Repair or remove it.", reason=kind_of_error)
    with failing, Image.open(source) as image:
        yield image


def read_image(file: MediaFile, mode: str, *, where: str = "") -> Any:
    """An image, upright, with the channels of one of Pillow's modes."""
    from PIL import ImageOps

    with opened_image(file, where=where) as image:
        return ImageOps.exif_transpose(image).convert(mode)


def _pixels(
    file: str,
    mode: str,
    height: int,
    width: int,
) -> bytes:
    """A resized image, [channels, height, width]."""
    from PIL.Image import Resampling

    resized = read_image(file, mode).resize((width, height), Resampling.BILINEAR)
    return (
        np.asarray(resized)
        .reshape(height, width, -1)
        .transpose(
            2,
            0,
            1,
        )
        .tobytes()
    )
