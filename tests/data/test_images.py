"""Images come as saved tensors or as a folder of files; the files need Pillow, and say so where it is missing."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.data.images import read_folder, read_tensors
from autofit.data.options import DataOptions, LabelRule, Normalisation

SHAPE = (3, 4, 6)
Paint = Callable[..., None]


def tensors(
    path: Path, shape: tuple[int, ...] = (1, 2, 2), classes: int = 2
) -> dict[str, torch.Tensor]:
    return dict(read_tensors(path, shape, LabelRule(classes)).tensors)


def test_tensors(tmp_path: Path) -> None:
    images = {"pixel_values": torch.rand(3, 1, 2, 2), "labels": torch.tensor([0, 1, 0])}
    torch.save({**images, "names": ["a"]}, tmp_path / "a.pt")
    found = tensors(tmp_path / "a.pt")
    assert found.keys() == images.keys()
    assert all(torch.equal(found[name], images[name]) for name in images)


@pytest.mark.parametrize("content", [b"", b"no tensors", b"hello world", b"PK\x03\x04abc"])
def test_a_file_of_no_tensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.pt cannot be read: .*Give what torch\.save wrote"):
        tensors(tmp_path / "a.pt")


class Harmful:
    """Reading this with plain pickle would run code."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_a_file_of_tensors_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"pixel_values": Harmful()}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="cannot be read"):
        tensors(tmp_path / "a.pt")


ONES = torch.ones(2, 1, 2, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.ones(2), "must hold pixel_values and labels"),
        ({"pixel_values": torch.ones(2)}, "must hold pixel_values and labels"),
        ({"pixel_values": 1, "labels": 2}, "must hold pixel_values and labels"),
        (
            {"pixel_values": torch.ones(2, 3, 4, 4), "labels": torch.ones(2)},
            "pixel_values are 2 x 3 x 4 x 4, but the model takes N x 1 x 2 x 2",
        ),
        (
            {"pixel_values": torch.ones(0, 1, 2, 2), "labels": torch.ones(0)},
            "pixel_values are 0 x 1",
        ),
        (
            {"pixel_values": ONES, "labels": torch.ones(3).long()},
            r"2 images have labels of shape \(3,\)",
        ),
        (
            {"pixel_values": ONES, "labels": torch.tensor([0, 2])},
            "label 2: label 2, but the model has classes 0 to 1",
        ),
        ({"pixel_values": ONES, "labels": torch.ones(2)}, "label 1: a label must be .* not float"),
    ],
)
def test_tensors_that_do_not_suit_the_model(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match=words):
        tensors(tmp_path / "a.pt")


# A folder of files


def test_without_pillow_a_folder_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        InputError, match=r"which Pillow reads, and it is not installed\. Install it"
    ):
        read_folder(tmp_path, SHAPE, DataOptions())


@pytest.fixture
def paint(tmp_path: Path) -> Paint:
    """Writes an image file of one colour, taller than it is wide."""
    module = pytest.importorskip("PIL.Image")

    def write(name: str, colour: Any = (255, 0, 51), mode: str = "RGB") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        module.new(mode, (5, 9), colour).save(tmp_path / name)

    return write


def test_a_folder_of_classes(tmp_path: Path, paint: Paint) -> None:
    paint("dog/a.png")
    paint("cat/deep/b.png", 255, "L")
    (tmp_path / "cat" / ".hidden").write_text("no image")
    (tmp_path / "readme.txt").write_text("no image")
    for name in ("Thumbs.db", "desktop.ini"):
        (tmp_path / "dog" / name).write_bytes(b"\0")
    options = DataOptions(labels=LabelRule(2), normalisation=Normalisation((0.0,), (1.0,)))
    pictures, labels, notes = read_folder(tmp_path, SHAPE, options)
    batch = pictures.batch(torch.tensor([0, 1]))
    assert batch["labels"].tolist() == [0, 1]
    assert labels.names == {"cat": 0, "dog": 1}
    assert notes == ()
    assert batch["pixel_values"].shape == (2, *SHAPE)
    assert torch.allclose(batch["pixel_values"][1, :, 2, 2], torch.tensor([1.0, 0.0, 0.2]))
    assert (batch["pixel_values"][0] == 1).all()


def test_one_mean_is_for_all_channels_or_one_for_each(tmp_path: Path, paint: Paint) -> None:
    paint("a/a.png", (255, 255, 255))
    options = DataOptions(normalisation=Normalisation((0.5,), (0.1, 0.2, 0.5)))
    pictures, _, _ = read_folder(tmp_path, SHAPE, options)
    pixels = pictures.batch(torch.tensor([0]))["pixel_values"]
    assert torch.allclose(pixels[0, :, 0, 0], torch.tensor([5.0, 2.5, 1.0]))


@pytest.mark.parametrize(("channels", "value"), [(1, 102 / 255), (4, 1.0)])
def test_images_have_the_channels_of_the_model(
    tmp_path: Path, paint: Paint, channels: int, value: float
) -> None:
    paint("a/a.png", (102, 102, 102))
    options = DataOptions(normalisation=Normalisation((0.0,), (1.0,)))
    pictures, _, _ = read_folder(tmp_path, (channels, 4, 6), options)
    pixels = pictures.batch(torch.tensor([0]))["pixel_values"]
    assert pixels.shape == (1, channels, 4, 6)
    assert pixels[0, -1].mean() == pytest.approx(value)


def test_a_changed_image_is_read_again(tmp_path: Path, paint: Paint) -> None:
    def red() -> float:
        pictures, _, _ = read_folder(tmp_path, SHAPE, DataOptions())
        return float(pictures.batch(torch.tensor([0]))["pixel_values"][0, 0, 0, 0])

    name = os.fsdecode(b"a/\xff.png")  # which is no UTF-8
    paint(name)
    assert red() == 1.0
    paint(name, (0, 0, 0))
    os.utime(tmp_path / name, (1, 1))
    assert red() == -1.0


def test_files_that_are_no_images_are_left_out_and_counted(tmp_path: Path, paint: Paint) -> None:
    paint("a/a.png")
    paint("a/b.png", (0, 0, 0))
    (tmp_path / "a" / "b.png").rename(tmp_path / "a" / "without-suffix")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / "model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "only-text").mkdir()
    (tmp_path / "only-text" / "a.csv").write_text("no image")
    pictures, labels, notes = read_folder(tmp_path, SHAPE, DataOptions())
    assert len(pictures) == 2
    assert labels.names == {"a": 0}
    assert notes == (
        f"left out, no image: 3 files, the first of them {tmp_path / 'a' / 'model.h5'}.",
    )


@pytest.mark.usefixtures("paint")
def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.png").write_bytes(b"no image")
    with pytest.raises(
        InputError, match=r"the image .*a/b\.png cannot be read: UnidentifiedImageError\. Repair or"
    ):
        read_folder(tmp_path, SHAPE, DataOptions())


@pytest.mark.usefixtures("paint")
def test_folders_that_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no directories with images"):
        read_folder(tmp_path, SHAPE, DataOptions())
    with pytest.raises(InputError, match="images of 7 channels, which image files do not have"):
        read_folder(tmp_path, (7, 4, 4), DataOptions())
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match="the data has 3 classes, but the model has 2"):
        read_folder(tmp_path, SHAPE, DataOptions(labels=LabelRule(2)))
