"""Batches of any structure: their samples, their micro-batches, and what their loss counts.

A batch is a tensor, or a dict, tuple, list, named tuple, dataclass or mapping-like object (transformers' BatchEncoding)
of tensors and such containers. Every tensor with dimensions has the samples along dim 0, unless its layout is known or
the workload splits its batches; a list of other things (texts) as long as there are samples holds one for each.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import torch

from autofit.core.errors import InputError, reported, told
from autofit.core.workload import NEXT_TOKEN_TASKS, Workload
from autofit.data.layouts import Layout, layout_of

Cut = Callable[[Any, int], Any]  # Workload.split: (batch, size) -> micro-batches of that many samples
_SPLIT = "say with split=... how to split it: a function of (batch, size) that returns a list of micro-batches"
IGNORED_LABEL = -100  # what torch's cross-entropy and transformers leave out of the mean


def map_tensors(
    batch: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    lists: Callable[[Any], Any] = lambda items: items,
    whole: Set[int] = frozenset(),
) -> Any:
    """The same batch with `function` applied to every tensor, and `lists` to lists that hold none (of texts) or whose
    ids are in `whole`. `lists` also gets tuples of texts, which a DataLoader makes of samples that are tuples."""

    def inner(value: Any) -> Any:
        return map_tensors(value, function, lists=lists, whole=whole)

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
            is_texts = id(batch) in whole or not tensors(batch)
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


def by_rows(batch: Any, size: int) -> list[Any]:
    """The `Workload.split` of batches that are known to have the samples along dim 0, although positions start again
    in a row: one such row alone would be taken for several samples."""
    total = _counted(batch, None)
    starts = range(0, total, size)
    return [_take(batch, range(start, min(start + size, total)), None, total) for start in starts]


def has_rows(batch: Any, cut: Cut | None = None) -> bool:
    """Whether the samples of a batch are the rows of its tensors."""
    return not _is_own(cut) and _layout(batch, cut) is None


def _is_own(cut: Cut | None) -> TypeGuard[Cut]:
    """Whether it is a function of the user's, which alone knows the samples."""
    return cut is not None and cut is not by_rows


def _layout(batch: Any, cut: Cut | None) -> Layout | None:
    return None if cut is by_rows else layout_of(batch)


def sample_count(batch: Any, cut: Cut | None = None) -> int:
    """The number of samples: as the layout says, or the size of dim 0, on which all tensors must agree."""
    return len(_parts(batch, 1, cut)) if _is_own(cut) else _counted(batch, _layout(batch, cut))


def _counted(batch: Any, layout: Layout | None) -> int:
    if layout:
        return len(layout.sizes)
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim()}
    if not sizes:
        message = f"the batch (a {type(batch).__name__}) holds no tensor with samples along dim 0."
        raise InputError(message, f"Give tensors, or a dict, tuple, list or dataclass of them, or {_SPLIT}.")
    if len(sizes) > 1:
        message = f"the tensors of a batch differ in size along dim 0: {sorted(sizes)}."
        raise InputError(message, f"Put the samples along dim 0 of every tensor, or {_SPLIT}.")
    return int(sizes.pop())


def split(batch: Any, size: int, cut: Cut | None = None) -> Iterator[Any]:
    """Micro-batches of `size` samples, the last one shorter when it does not divide."""
    if _is_own(cut):
        yield from _parts(batch, size, cut)
        return
    layout = _layout(batch, cut)
    total = _counted(batch, layout)
    if size >= total:
        yield batch
        return
    for start in range(0, total, size):
        yield _take(batch, range(start, min(start + size, total)), layout, total)


def samples_of(batch: Any, start: int, stop: int, cut: Cut | None = None) -> Any:
    """Samples `start` to `stop` of a batch, as views of it. With a `cut`, no more than are before them, unless none."""
    if _is_own(cut):
        first = _parts(batch, stop, cut)[0]
        return _parts(first, start, cut)[1] if start else first
    layout = _layout(batch, cut)
    return _take(batch, range(start, stop), layout, _counted(batch, layout))


def repeat_to(batch: Any, samples: int, cut: Cut | None = None) -> Any:
    """A batch of exactly `samples` samples, made by repeating and cutting the one given; of samples that differ in size
    the largest one is repeated."""
    if _is_own(cut):
        if samples <= (total := sample_count(batch, cut)):
            return samples_of(batch, 0, samples, cut)
        message = f"a batch of {samples} samples cannot be made from one of {total}, which only split= understands."
        raise InputError(message, "Give larger batches.")
    layout = _layout(batch, cut)
    total = _counted(batch, layout)
    largest = layout.sizes.index(max(layout.sizes)) if layout and samples != total else None
    chosen = [index % total for index in range(samples)] if largest is None else [largest] * samples
    return _take(batch, chosen, layout, total)


def _take(batch: Any, samples: Sequence[int], layout: Layout | None, total: int) -> Any:
    """These of all samples of a batch with this layout; a range as views."""
    takes = layout.takes if layout else {}
    rows = slice(samples.start, samples.stop) if isinstance(samples, range) else list(samples)

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        take = takes.get(id(tensor))
        return take(samples) if take else tensor[rows] if tensor.dim() else tensor

    def of_list(items: Any) -> Any:
        return type(items)(items[sample] for sample in samples) if len(items) == total else items

    return map_tensors(batch, of_tensor, lists=of_list, whole=layout.lists if layout else frozenset())


def _parts(batch: Any, size: int, cut: Cut) -> list[Any]:
    """What the user's own function splits a batch into."""
    with reported(lambda error: f"split raised {told(error)}.", "Correct it there."):
        parts = cut(batch, size)
    if not isinstance(parts, list | tuple) or not parts:
        given = f"an empty {type(parts).__name__}" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
        raise InputError(f"split returned {given}, not a list of micro-batches.", "Return a list.")
    return list(parts)


def labels_of(batch: Any, name: str = "labels") -> torch.Tensor | None:
    """The batch's tensor of that name, if it has one."""
    value = batch.get(name) if isinstance(batch, Mapping | UserDict) else getattr(batch, name, None)
    return value if isinstance(value, torch.Tensor) else None


def loss_count(workload: Workload, batch: Any) -> int:
    """The number of terms in the mean loss of a batch, its weight among the slices of a larger batch. Causal language
    models predict the *next* token, so the first label of each row is never used: counting it puts the gradient 8 % off
    with uneven padding (measured). Other integer labels per token count where they are valid; anything else counts
    samples, also CTC: its loss is divided by each sample's own number of labels."""
    if counts_samples(workload, batch):
        return sample_count(batch, workload.split)
    if workload.count is not None:
        return int(workload.count(batch))
    shifted = labels_of(batch, "shift_labels")
    if shifted is not None and workload.task in NEXT_TOKEN_TASKS:  # transformers' loss uses them where they are given
        return int((shifted != IGNORED_LABEL).sum())
    labels = labels_of(batch)
    assert labels is not None, "else samples count"
    if workload.task in NEXT_TOKEN_TASKS and labels.dim() >= 2:
        labels = labels[:, 1:]
    return int((labels != IGNORED_LABEL).sum())


def counts_samples(workload: Workload, batch: Any) -> bool:
    """Whether the terms in the mean loss of such a batch are its samples."""
    if workload.count is not None:
        return False
    if workload.task in NEXT_TOKEN_TASKS and labels_of(batch, "shift_labels") is not None:
        return False
    labels = labels_of(batch)
    return labels is None or labels.is_floating_point() or workload.task == "ctc"


def counted_slices(workload: Workload, batch: Any, size: int) -> list[tuple[Any, int]]:
    """The slices of a batch, each with the number of terms in its loss; without those that have no mean (0/0)."""
    counted = ((part, loss_count(workload, part)) for part in split(batch, size, workload.split))
    return [(part, count) for part, count in counted if count]


def weight_of(workload: Workload, count: float, total: float) -> float:
    """The weight of a slice in the loss of a batch, by the terms in both."""
    return 1.0 if workload.reduction == "sum" else count / total


def few_samples(workload: Workload, samples: int, batch: Any = None) -> Any:
    """So many samples to try the loss on, at most all; `batch`: of as many. Packed ones are of a whole batch, in which
    they differ in size: a smaller one may hold the largest of them again and again."""
    whole = workload.effective_batch_size
    batch = workload.batch(min(samples, whole)) if batch is None else batch
    if has_rows(batch, workload.split):
        return batch
    return samples_of(workload.batch(whole), 0, min(samples, whole), workload.split)


def own_samples(batch: Any, part: int, parts: int, cut: Cut | None = None) -> tuple[Any, bool]:
    """One of several equal parts of a batch, the last ones smaller where it does not divide; a part without samples is
    the batch's first one, and False."""
    total = sample_count(batch, cut)
    size = -(-total // parts)
    start = part * size
    if start >= total:
        return samples_of(batch, 0, 1, cut), False
    return samples_of(batch, start, min(start + size, total), cut), True
