"""A model and a data loader, as `autofit.fit` gets them, become a Workload; and the loader, batches to train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.training.data import labels_of, map_tensors, repeat_to, sample_count, tensors
from autofit.training.inspect import blamed_on
from autofit.training.skeleton import skeleton_of

_PEEKED_BATCHES = 64
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


def workload_from(model: nn.Module, loader: Any, loss: Callable[[Any, Any], Any] | None) -> Workload:
    """The workload of training `model` on `loader`, whose own batch size is the effective batch.

    Looks at up to 64 batches for the largest shape; the model itself is not touched.

    Raises:
        InputError: not a module, a loader that is empty or can be read only once, or batches without samples.
    """
    if not isinstance(model, nn.Module):
        message = f"the model must be an nn.Module or the name of one, not a {type(model).__name__}."
        raise InputError(message, "Pass the model itself, or an autofit.Workload.")
    seen = list(itertools.islice(batches_of(loader), _PEEKED_BATCHES))
    if not seen:
        raise InputError("the loader is empty: it gave no batch.", "Check the data set.")
    largest = max(seen, key=_elements_per_sample)  # the last batch may hold few samples that are the longest
    with blamed_on("copying the model's structure", _NOT_COPIED):
        skeleton = skeleton_of(model)
    sequence_length = _sequence_length(largest)
    return Workload(
        model=SameSkeleton(skeleton),
        batch=RepeatedBatch(map_tensors(largest, lambda tensor: tensor.detach().cpu())),
        loss=loss,
        effective_batch_size=max(sample_count(batch) for batch in seen),
        unit="tokens" if sequence_length else "samples",
        sequence_length=sequence_length,
        task=_task(model, largest),
        name=type(model).__name__,
    )


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


def _sequence_length(batch: Any) -> int | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) or hasattr(batch, "keys") else None
    return int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _task(model: nn.Module, batch: Any) -> str:
    """By transformers' names. Causal language models shift their labels; LoRA trains a classifier's new head whole."""
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")) and labels_of(batch) is not None:
        return "causal-lm"
    if name.endswith("ForSequenceClassification"):
        return "sequence-classification"
    return "image-classification" if name.endswith("ForImageClassification") else "custom"
