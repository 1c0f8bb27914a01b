"""Pictures with captions as training data: which files a folder holds, latents that are there
already, and a loader that draws noise beside them."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autofit.core.errors import InputError, pluralize
from autofit.core.files import check_readable, read_text
from autofit.data.failures import failing_as, kind_of_error
from autofit.data.folders import is_litter
from autofit.data.samples import Batch, FileLoader, Stacked, filled_up

Noise = Callable[[Batch, torch.Generator], Batch]

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_METADATA = "metadata.jsonl"
_CAPTIONS = ("text", "caption", "prompt")  # keys of a row, the first before the next
_MOST_SEED = 2**62


@dataclass(frozen=True)
class NoisyLoader(FileLoader):
    """A loader of latents that draws other noise in each pass, and the same where one goes on.

    Attributes:
        noise: (batch, generator) -> what is drawn for it: `noise` and `timesteps`.
    """

    noise: Noise | None = None

    def _batches(
        self,
        order: torch.Tensor,
        generator: torch.Generator,
        samples: int = 0,
    ) -> Iterator[Batch]:
        assert self.noise is not None, "it is made with one"
        seed = generator.initial_seed()
        given, begun = divmod(samples, self.batch_size)
        batches = super()._batches(order, generator, given * self.batch_size)
        for number, batch in enumerate(batches, given):
            drawing = torch.Generator().manual_seed((seed + number) % _MOST_SEED)
            whole = {**batch, **self.noise(batch, drawing)}
            first = begun if number == given else 0
            yield {name: tensor[first:] for name, tensor in whole.items()}


@dataclass(frozen=True)
class Buckets:
    """Samples of several sizes: those of each in a bucket, numbered one bucket after the other."""

    stacks: tuple[Stacked, ...]

    def __len__(self) -> int:
        return sum(map(len, self.stacks))

    def batch(self, chosen: torch.Tensor) -> Batch:
        """The samples of these numbers, which are of one bucket."""
        first = int(chosen[0])
        for stack, numbers in zip(self.stacks, self.numbers(), strict=True):
            if first in numbers:
                return stack.batch(chosen - numbers.start)
        raise IndexError(first)

    def largest_id(self) -> int:
        return 0

    def numbers(self) -> list[range]:
        """The numbers of each bucket's samples."""
        found = []
        start = 0
        for stack in self.stacks:
            found.append(range(start, start + len(stack)))
            start += len(stack)
        return found


@dataclass(frozen=True)
class BucketLoader(NoisyLoader):
    """A loader whose batches are each of one bucket."""

    def __len__(self) -> int:
        assert isinstance(self.samples, Buckets), "it is made with them"
        return sum(math.ceil(len(stack) / self.batch_size) for stack in self.samples.stacks)

    def _order(self, generator: torch.Generator) -> torch.Tensor:
        """Batches of all buckets in any order; each bucket fills up its own last batch."""
        assert isinstance(self.samples, Buckets), "it is made with them"
        batches: list[torch.Tensor] = []
        for numbers in self.samples.numbers():
            shuffled = numbers.start + torch.randperm(len(numbers), generator=generator)
            batches += filled_up(shuffled, self.batch_size).split(self.batch_size)

        places = torch.randperm(len(batches), generator=generator).tolist()
        return torch.cat([batches[place] for place in places])

    def in_order(self) -> Iterator[Batch]:
        """Every sample once, one bucket after the other, with the same noise each time."""
        assert isinstance(self.samples, Buckets), "it is made with them"
        for stack in self.samples.stacks:
            alone = NoisyLoader(stack, self.batch_size, noise=self.noise)
            yield from alone.in_order()


def latents_loader(
    buckets: Sequence[Mapping[str, torch.Tensor]],
    batch_size: int,
    noise: Noise,
    notes: Sequence[str] = (),
) -> NoisyLoader:
    """The loader of latents and conditions, with the samples of each bucket along dim 0."""
    stacks = tuple(map(Stacked, buckets))
    given: dict[str, Any] = {"notes": tuple(notes), "noise": noise}
    if len(stacks) == 1:
        return NoisyLoader(stacks[0], batch_size, **given)
    return BucketLoader(Buckets(stacks), batch_size, **given)


def in_order(loader: NoisyLoader) -> Any:
    """The batches of a loader in the file's order, with the same noise each time."""
    return dataclasses.replace(loader).in_order


def read_latents(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .pt file.

    Args:
        shapes: of each tensor's samples that the model takes, by its name.

    Raises:
        InputError: the file does not hold them, or in other shapes.
    """
    remedy = "Save a mapping of tensors with the samples along dim 0, or give a folder of pictures."
    with failing_as(f"the data file {path} cannot be read", remedy, reason=kind_of_error):
        if path.suffix.lower() == ".safetensors":
            found = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, weights_only=True)
    if not isinstance(found, dict):
        raise InputError(f"the data file {path} holds no mapping of tensors.", remedy)

    tensors = {}
    for name, shape in shapes.items():
        tensor = found.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"the data file {path} lacks {name}.", remedy)
        if tuple(tensor.shape[1:]) != tuple(shape) or not len(tensor):
            given = " x ".join(map(str, tensor.shape))
            wanted = " x ".join(map(str, ("N", *shape)))
            message = f"{path}: {name} is {given}, and the model takes {wanted}."
            raise InputError(message, "Encode the pictures for the resolution of the result.")
        tensors[name] = tensor

    counts = {len(tensor) for tensor in tensors.values()}
    if len(counts) > 1:
        numbers = ", ".join(map(str, sorted(counts)))
        raise InputError(
            f"{path}: its tensors have different numbers of samples: {numbers}.", remedy
        )
    return tensors


def captioned_pictures(folder: Path, notes: list[str]) -> list[tuple[Path, str]]:
    """The pictures of a folder with their captions, sorted by name.

    Captions are in metadata.jsonl (`file_name`, and `text`, `caption` or `prompt`), else in a .txt
    beside each picture. A picture without one has an empty caption, which a note tells.

    Raises:
        InputError: it holds no pictures, or what it says of them cannot be read.
    """
    check_readable(folder, "the folder of pictures")
    metadata = folder / _METADATA
    if metadata.is_file():
        return _listed(metadata)

    pairs = []
    bare = 0
    for file in sorted(folder.rglob("*")):
        is_picture = file.suffix.lower() in _PICTURES and file.is_file()
        if not is_picture or is_litter(file.relative_to(folder)):
            continue
        beside = file.with_suffix(".txt")
        caption = ""
        if beside.is_file():
            caption = read_text(beside).strip()
        else:
            bare += 1
        pairs.append((file, caption))

    if not pairs:
        message = f"the folder {folder} holds no pictures ({', '.join(_PICTURES)})."
        raise InputError(message, "Give a folder of pictures, with a .txt beside each.")
    if bare:
        notes.append(f"without a caption: {bare} of {pluralize(len(pairs), 'picture')}.")
    return pairs


def _listed(metadata: Path) -> list[tuple[Path, str]]:
    """The pictures that a metadata.jsonl lists."""
    pairs = []
    for number, line in enumerate(read_text(metadata).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{metadata}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place} is no valid JSON.", "Correct it.") from error

        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{place} has no file_name.", "Name the picture that it is of.")
        captions = [row[key] for key in _CAPTIONS if isinstance(row.get(key), str)]
        if not captions:
            raise InputError(f"{place} has no {' or '.join(_CAPTIONS)}.", "Give its caption.")
        file = metadata.parent / name
        if not file.is_file():
            raise InputError(f"{place}: {file} is not there.", "Correct its file_name.")
        pairs.append((file, captions[0]))

    if not pairs:
        raise InputError(f"{metadata} lists no pictures.", "Give a line for each.")
    return pairs
