"""Batches as users have them: how many samples one holds, how it is cut into micro-batches, and what its loss counts.

A batch is a tensor, or a dict, tuple, list, named tuple, dataclass or mapping-like object (transformers' BatchEncoding)
of tensors and such containers. Every tensor with dimensions has the samples along dim 0; a list of other things (texts)
that is as long as there are samples holds one for each.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload

IGNORED_LABEL = -100  # what torch's cross-entropy and transformers leave out of the mean


def map_tensors(
    batch: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    lists: Callable[[Any], Any] = lambda items: items,
) -> Any:
    """The same batch with `function` applied to every tensor in it, and `lists` to lists that hold none (of texts).

    Also to tuples of texts, which a DataLoader makes of samples that are tuples.
    """

    def inner(value: Any) -> Any:
        return map_tensors(value, function, lists=lists)

    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, UserDict):  # BatchEncoding takes its data as first argument
        return type(batch)({key: inner(value) for key, value in batch.items()})
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, {key: inner(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(inner(value) for value in batch))
    if isinstance(batch, list | tuple):
        return lists(batch) if _is_list(batch) else type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [each.name for each in dataclasses.fields(batch) if each.init]
        return dataclasses.replace(batch, **{name: inner(getattr(batch, name)) for name in fields})
    return batch


def _is_list(batch: list[Any] | tuple[Any, ...]) -> bool:
    if type(batch) is list:
        return not tensors(batch)
    return type(batch) is tuple and bool(batch) and all(isinstance(each, str | bytes) for each in batch)


def _rebuilt_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type; a plain dict where the type cannot be made from one."""
    try:
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping | UserDict):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, each.name) for each in dataclasses.fields(batch) if each.init)
    else:
        return []
    return [tensor for part in parts for tensor in tensors(part)]


def sample_count(batch: Any) -> int:
    """Samples in a batch: the size of dim 0, on which all its tensors must agree.

    Raises:
        InputError: no tensor in it, or tensors of different sizes along dim 0.
    """
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim()}
    if not sizes:
        message = f"the batch (a {type(batch).__name__}) holds no tensor with samples along dim 0."
        raise InputError(message, "Give tensors, or a dict, tuple, list or dataclass of them.")
    if len(sizes) > 1:
        message = f"the tensors of a batch differ in size along dim 0: {sorted(sizes)}."
        raise InputError(message, "Put the samples along dim 0 of every tensor.")
    return int(sizes.pop())


def split(batch: Any, size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches of `size` samples, the last one shorter when it does not divide."""
    total = sample_count(batch)
    if size >= total:
        yield batch
        return
    for start in range(0, total, size):
        yield _part(batch, start, min(start + size, total), total)


def samples_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch, as views of it."""
    return _part(batch, start, stop, sample_count(batch))


def _part(batch: Any, start: int, stop: int, total: int) -> Any:
    return map_tensors(
        batch,
        lambda tensor: tensor[start:stop] if tensor.dim() else tensor,
        lists=lambda items: items[start:stop] if len(items) == total else items,
    )


def repeat_to(batch: Any, samples: int) -> Any:
    """A batch of exactly `samples` samples, made by repeating and cutting the one given."""
    have = sample_count(batch)
    index = torch.arange(samples) % have
    return map_tensors(
        batch,
        lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor,
        lists=lambda items: type(items)(items[place] for place in index.tolist()) if len(items) == have else items,
    )


def labels_of(batch: Any) -> torch.Tensor | None:
    """The batch's `labels` tensor, if it has one by that name."""
    return _tensor(batch, "labels")


def _tensor(batch: Any, name: str) -> torch.Tensor | None:
    value = batch.get(name) if isinstance(batch, Mapping | UserDict) else getattr(batch, name, None)
    return value if isinstance(value, torch.Tensor) else None


def loss_count(workload: Workload, batch: Any) -> int:
    """How many terms the mean loss of this batch runs over, its weight among the slices of a larger batch.

    Causal language models predict the *next* token, so the first label of each row is never used: counting it was
    measured to put the gradient 8 % off with uneven padding. Other integer labels per token count where they are
    valid; anything else counts samples.
    """
    if workload.count is not None:
        return int(workload.count(batch))
    shifted = _tensor(batch, "shift_labels")
    if shifted is not None and workload.task == "causal-lm":  # what transformers' loss goes by where it is given
        return int((shifted != IGNORED_LABEL).sum())
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return sample_count(batch)
    if workload.task == "causal-lm" and labels.dim() >= 2:
        labels = labels[:, 1:]
    return int((labels != IGNORED_LABEL).sum())


def weighted_slices(workload: Workload, batch: Any, size: int) -> list[tuple[Any, float]]:
    """The slices of a batch, each with its share in the batch's loss.

    A mean is weighted by what it runs over. A slice without a valid label has no mean (it would be 0/0), and is left
    out.
    """
    slices = list(split(batch, size))
    counts = [loss_count(workload, each) for each in slices]
    total = sum(counts)
    is_sum = workload.reduction == "sum"
    return [(each, 1.0 if is_sum else count / total) for each, count in zip(slices, counts, strict=True) if count]
