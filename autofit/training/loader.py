"""A model and a data loader, as `autofit.fit` gets them, become a Workload; and the loader, batches to train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.workload import Workload, task_of
from autofit.training.data import labels_of, map_tensors, repeat_to, sample_count, tensors
from autofit.training.inspect import blamed_on
from autofit.training.skeleton import skeleton_of

_NOT_COPIED = "Take that out of the model, or search with autofit.Workload(model=...) and a function that makes it."


@dataclass(frozen=True)
class SameSkeleton:
    """() -> a model of the structure of one that lives in the user's process, without its weights."""

    skeleton: nn.Module

    def __call__(self) -> nn.Module:
        return self.skeleton  # each probe is a process of its own and unpickles its own


@dataclass(frozen=True)
class RepeatedBatch:
    """n -> n samples, made from one real batch of the largest shape seen."""

    batch: Any

    def __call__(self, samples: int) -> Any:
        return repeat_to(self.batch, samples)


@dataclass(frozen=True)
class Peek:
    """How the largest batch is found: the one given, or the largest of the loader's first `batches`."""

    worst_case: Any = None
    batches: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.batches, bool) or not isinstance(self.batches, int) or self.batches < 1:
            raise InputError(f"peek must be a positive whole number of batches, not {self.batches!r}.")


def workload_from(
    model: nn.Module,
    loader: Any,
    loss: Callable[[Any, Any], Any] | None,
    *,
    optimizer: Callable[[Any], Any] | None = None,
    peek: Peek | None = None,
) -> Workload:
    """The workload of training `model` on `loader`, whose own batch size is the effective batch.

    Looks at the first batches for the largest shape; the model itself is not touched.

    Raises:
        InputError: not a module with weights in one place, a loader that is empty or can be read only once, or batches
            without samples or of different structure.
    """
    peek = peek or Peek()
    _check_model(model)
    seen = list(itertools.islice(batches_of(loader), peek.batches))
    if not seen:
        raise InputError("the loader is empty: it gave no batch.", "Check the data set.")
    _check_structure(seen if peek.worst_case is None else [*seen, peek.worst_case])
    # The last batch may hold few samples that are the longest.
    largest = peek.worst_case if peek.worst_case is not None else max(seen, key=_elements_per_sample)
    with blamed_on("copying the model's structure", _NOT_COPIED):
        skeleton = skeleton_of(model)
    sequence_length = _sequence_length(largest)
    return Workload(
        model=SameSkeleton(skeleton),
        batch=RepeatedBatch(map_tensors(largest, lambda tensor: tensor.detach().cpu())),
        loss=loss,
        optimizer=optimizer,
        effective_batch_size=max(sample_count(batch) for batch in seen),
        unit="tokens" if sequence_length else "samples",
        sequence_length=sequence_length,
        task=_task(model, largest),
        name=type(model).__name__,
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        message = f"the model must be an nn.Module or the name of one, not a {type(model).__name__}."
        raise InputError(message, "Pass the model itself, or an autofit.Workload.")
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in places:
        raise InputError("the model has weights on the meta device: there is nothing to train.", "Load them first.")
    if len(places) > 1:
        message = f"the model's weights are spread over {' and '.join(places)}; autofit trains on one device."
        raise InputError(message, "Load it without a device_map.")


def _check_structure(batches: list[Any]) -> None:
    first = _structure(batches[0])
    for number, batch in enumerate(batches):
        sample_count(batch)
        if _structure(batch) != first:
            message = f"batch {number} of the loader is {_structure(batch)}, but the first is {first}."
            raise InputError(message, "Give all batches the same structure.")


def _structure(batch: Any) -> str:
    """A batch in words: its containers, their keys, and where tensors stand in them."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor of {batch.dim()} dimensions"
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return f"{{{', '.join(f'{key}: {_structure(batch[key])}' for key in sorted(batch.keys(), key=str))}}}"
    if isinstance(batch, tuple) or (isinstance(batch, list) and tensors(batch)):
        return f"({', '.join(_structure(each) for each in batch)})"
    return f"a {type(batch).__name__}"


def _elements_per_sample(batch: Any) -> float:
    return sum(tensor.numel() for tensor in tensors(batch)) / max(1, sample_count(batch))


def batches_of(loader: Any) -> Iterator[Any]:
    """A fresh pass over a loader: an iterable that can be read again, or a function that returns an iterator.

    Raises:
        InputError: a bare iterator, whose batches would be lost to the search, or nothing that can be iterated.
    """
    if callable(loader) and not isinstance(loader, Iterable):
        return iter(loader())
    if not isinstance(loader, Iterable):
        message = f"the loader must be an iterable of batches, not a {type(loader).__name__}."
        raise InputError(message, "For example a DataLoader.")
    batches = iter(loader)  # once: it starts a DataLoader's workers and draws its seed
    if batches is loader:
        message = f"the loader is a {type(loader).__name__}, which can be read only once: the search would use it up."
        raise InputError(message, "Pass a function that returns it, or a DataLoader, or a list of batches.")
    return batches


def endless(loader: Any) -> Iterator[Any]:
    """Pass after pass over the loader, in its own order."""
    while True:
        empty = True
        for batch in batches_of(loader):
            empty = False
            yield batch
        if empty:
            raise InputError("the loader is empty: it gave no batch.", "Check the data set.")


def length_of(loader: Any) -> int | None:
    """How many batches a pass has, where that is known without reading one."""
    try:
        return len(loader)
    except TypeError:  # also of a DataLoader over an IterableDataset, which has a length only by its looks
        return None


def _sequence_length(batch: Any) -> int | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) or hasattr(batch, "keys") else None
    return int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _task(model: nn.Module, batch: Any) -> str:
    """Causal language models shift their labels; LoRA trains a classifier's new head whole."""
    task = task_of(model) or "custom"
    return "custom" if task == "causal-lm" and labels_of(batch) is None else task
