"""Batches of any structure: their samples, their micro-batches, and what their loss counts.

A batch is a tensor, or a dict, tuple, list, named tuple, dataclass or mapping-like object (transformers' BatchEncoding)
of tensors and such containers. Every tensor with dimensions has the samples along dim 0; a list of other things (texts)
as long as there are samples holds one for each.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload

IGNORED_LABEL = -100  # what torch's cross-entropy and transformers leave out of the mean


def map_tensors(
    batch: Any, function: Callable[[torch.Tensor], torch.Tensor], *, lists: Callable[[Any], Any] = lambda items: items
) -> Any:
    """The same batch with `function` applied to every tensor, and `lists` to lists that hold none (of texts). `lists`
    also gets tuples of texts, which a DataLoader makes of samples that are tuples."""

    def inner(value: Any) -> Any:
        return map_tensors(value, function, lists=lists)

    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, UserDict):  # BatchEncoding takes its data as first argument
        return type(batch)({key: inner(value) for key, value in batch.items()})
    if isinstance(batch, Mapping):
        items = {key: inner(value) for key, value in batch.items()}
        try:
            return type(batch)(items)  # type: ignore[call-arg]
        except TypeError:  # a type that cannot be made from a dict
            return items
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, list | tuple):
        if type(batch) is list:
            is_texts = not tensors(batch)
        else:
            is_texts = type(batch) is tuple and bool(batch) and all(isinstance(item, str | bytes) for item in batch)
        return lists(batch) if is_texts else type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: inner(getattr(batch, name)) for name in fields})
    return batch


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping | UserDict):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init)
    else:
        return []
    return [tensor for part in parts for tensor in tensors(part)]


def sample_count(batch: Any) -> int:
    """The number of samples: the size of dim 0, on which all tensors must agree."""
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim()}
    if not sizes:
        message = f"the batch (a {type(batch).__name__}) holds no tensor with samples along dim 0."
        raise InputError(message, "Give tensors, or a dict, tuple, list or dataclass of them.")
    if len(sizes) > 1:
        message = f"the tensors of a batch differ in size along dim 0: {sorted(sizes)}."
        raise InputError(message, "Put the samples along dim 0 of every tensor.")
    return int(sizes.pop())


def split(batch: Any, size: int) -> Iterator[Any]:
    """Micro-batches of `size` samples, the last one shorter when it does not divide."""
    total = sample_count(batch)
    if size >= total:
        yield batch
        return
    for start in range(0, total, size):
        yield samples_of(batch, start, min(start + size, total))


def samples_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch, as views of it."""
    total = sample_count(batch)
    return map_tensors(
        batch,
        lambda tensor: tensor[start:stop] if tensor.dim() else tensor,
        lists=lambda items: items[start:stop] if len(items) == total else items,
    )


def repeat_to(batch: Any, samples: int) -> Any:
    """A batch of exactly `samples` samples, made by repeating and cutting the one given."""
    total = sample_count(batch)
    index = torch.arange(samples) % total
    return map_tensors(
        batch,
        lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor,
        lists=lambda items: type(items)(items[i] for i in index.tolist()) if len(items) == total else items,
    )


def labels_of(batch: Any, name: str = "labels") -> torch.Tensor | None:
    """The batch's tensor of that name, if it has one."""
    value = batch.get(name) if isinstance(batch, Mapping | UserDict) else getattr(batch, name, None)
    return value if isinstance(value, torch.Tensor) else None


def loss_count(workload: Workload, batch: Any) -> int:
    """The number of terms in the mean loss of a batch, its weight among the slices of a larger batch. Causal language
    models predict the *next* token, so the first label of each row is never used: counting it puts the gradient 8 % off
    with uneven padding (measured). Other integer labels per token count where they are valid; anything else counts
    samples."""
    if workload.count is not None:
        return int(workload.count(batch))
    shifted = labels_of(batch, "shift_labels")
    if shifted is not None and workload.task == "causal-lm":  # transformers' loss uses them where they are given
        return int((shifted != IGNORED_LABEL).sum())
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return sample_count(batch)
    if workload.task == "causal-lm" and labels.dim() >= 2:
        labels = labels[:, 1:]
    return int((labels != IGNORED_LABEL).sum())


def weighted_slices(workload: Workload, batch: Any, size: int) -> list[tuple[Any, float]]:
    """The slices of a batch, each with its weight in the batch's loss; without those that have no mean (0/0)."""
    slices = list(split(batch, size))
    counts = [loss_count(workload, part) for part in slices]
    total = sum(counts)
    is_sum = workload.reduction == "sum"
    return [(part, 1.0 if is_sum else count / total) for part, count in zip(slices, counts, strict=True) if count]
