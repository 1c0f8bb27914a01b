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
from autofit.core.workload import REFERENCE, TRAINED
from autofit.data.batch import map_tensors
from autofit.data.samples import FileLoader
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode


def fill_reference(
    setup: Setup, loaders: list[Any], directory: Path | None, listener: Callable[[str], Any]
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
        column = _read(file, blank)
        if column is None:
            samples = pluralize(len(loader.samples), "sample")
            listener(f"asking the model about {samples} once, before it is trained.")
            column = _computed(setup, loader)
            if file is not None and setup.ranks.is_first:
                _write(file, column)
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
            batch = map_tensors(loader.samples.batch(chosen), lambda each: each.to(setup.device))
            with setup.forward_context():
                found = loss.precomputed(models, batch)
            if number < len(parts):
                own[str(number)] = found.float().cpu()
            setup.exchange.reshard()

    of_all = ranks.joined(own)
    return torch.cat([of_all[str(number)] for number in range(len(parts))])


def _read(file: Path | None, blank: torch.Tensor) -> torch.Tensor | None:
    """What a file holds for a column; None where it is not there, or of other data."""
    if file is None or not file.is_file():
        return None

    from safetensors.torch import load_file

    column = load_file(file).get(REFERENCE)
    if column is None or column.shape != blank.shape:
        return None
    return column


def _write(file: Path, column: torch.Tensor) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file({REFERENCE: column}, part)
    part.replace(file)
