"""What the model says of each sample before it is trained, computed once for all of the data.

Losses that compare with a reference model then need none in memory (`reference: precomputed`). The
model that was just built is that reference: nothing was trained yet, and adapters begin without
effect.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autofit.core.errors import pluralize
from autofit.core.files import digest
from autofit.core.workload import REFERENCE, TRAINED
from autofit.data.batch import map_tensors
from autofit.data.samples import FileLoader
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode

_LOOKED_AT = 256  # samples by which data are told from others


def fill_reference(
    setup: Setup,
    loaders: list[Any],
    directory: Path | None,
    listener: Callable[[str], Any],
) -> None:
    """Fill the columns that loaders of files left blank. All ranks call this together.

    A run that is resumed reads what it found before from its output directory.
    """
    if setup.config.reference != "precomputed":
        return

    for number, loader in enumerate(map(_file_loader, loaders)):
        blank = None if loader is None else loader.blank
        if loader is None or blank is None:
            continue

        file = None if directory is None else directory / REFERENCE / f"{number}.safetensors"
        data = _digest(loader)
        column = _read(file, data)
        # Machines without a disk in common: where one has no file, all compute together.
        (is_missing,) = setup.ranks.largest(float(column is None))

        if column is None or is_missing:
            samples = pluralize(len(loader.samples), "sample")
            listener(f"asking the model about {samples} once, before it is trained.")
            column = _computed(setup, loader)
            if file is not None and setup.ranks.is_first:
                _write(file, column, data)

        blank.copy_(column)


def _file_loader(loader: Any) -> FileLoader | None:
    """The loader of a file, also where a method of it gives the batches."""
    found = getattr(loader, "__self__", loader)
    return found if isinstance(found, FileLoader) else None


@torch.no_grad()
def _computed(setup: Setup, loader: FileLoader) -> torch.Tensor:
    """What the model says of each sample, in the order of the file; every rank finds its share."""
    ranks = setup.ranks
    loss: Any = setup.workload.loss
    models = {TRAINED: setup.model, REFERENCE: setup.model}
    parts = torch.arange(len(loader.samples)).split(setup.micro_batch_size)
    rounds = math.ceil(len(parts) / ranks.layout.dp_degree)

    own: dict[str, torch.Tensor] = {}
    with evaluation_mode(setup.model), setup.step_context():
        for turn in range(rounds):
            number = turn * ranks.layout.dp_degree + ranks.dp_rank
            chosen = parts[min(number, len(parts) - 1)]  # the last one again, with the other ranks
            batch = map_tensors(
                loader.samples.batch(chosen), lambda tensor: tensor.to(setup.device)
            )
            with setup.forward_context():
                found = loss.precomputed(models, batch)
            if number < len(parts):
                own[str(number)] = found.float().cpu()

            setup.exchange.reshard()

    of_all = ranks.joined(own)
    return torch.cat([of_all[str(number)] for number in range(len(parts))])


def _digest(loader: FileLoader) -> str:
    """A name for the samples, by how many there are and by some of them."""
    total = len(loader.samples)
    chosen = torch.linspace(0, total - 1, min(total, _LOOKED_AT)).long()
    batch = loader.samples.batch(chosen)

    return digest(f"{total} {batch['input_ids'].tolist()} {batch['labels'].tolist()}")


def _read(file: Path | None, data: str) -> torch.Tensor | None:
    """What a file holds for a column; None where it is not there, or of other data."""
    if file is None or not file.is_file():
        return None

    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        if (stored.metadata() or {}).get("data") != data:
            return None

        column: torch.Tensor = stored.get_tensor(REFERENCE)

    return column


def _write(file: Path, column: torch.Tensor, data: str) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file(
        {REFERENCE: column},
        part,
        metadata={"data": data},
    )
    part.replace(file)
