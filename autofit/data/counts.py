"""What a mean loss may run over, counted in batches: samples, valid labels, tokens that are no padding.

`candidates` lists what the tensors of a batch offer; `training.equal_work` finds out which of them a loss uses.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autofit.core.tasks import TASKS
from autofit.core.workload import EACH, Count, Workload
from autofit.data.batch import IGNORED_LABEL, labels_of, sample_count, split
from autofit.data.layouts import layout_of

SAMPLES = Count()
# what losses leave out: torch's default, and what data sets pad labels with
_IGNORED = (IGNORED_LABEL, -1, 0, 255)
_SIZES = ("len", "size", "count", "num")  # in the names of tensors that hold the sizes of samples
_MOST_DIMS = 4  # of tensors of labels: those of videos' pixels
_Path = tuple[Any, ...]


def count_of(workload: Workload, batch: Any) -> Count:
    """What the workload's mean loss runs over: what was proven, else what its task says."""
    if workload.traits and workload.traits.count:
        return workload.traits.count
    return by_task(workload, batch)


def by_task(workload: Workload, batch: Any) -> Count:
    """What a loss of this task runs over. Causal language models predict the *next* token, so the first label of each
    row is never used: counting it puts the gradient 8 % off with uneven padding (measured). Other integer labels per
    token count where they are valid; anything else counts samples, also CTC: its loss is divided by each sample's own
    number of labels."""
    task = TASKS[workload.task]
    # which transformers prefers
    if task.predicts_next_token and labels_of(batch, "shift_labels") is not None:
        return Count("unequal", ("shift_labels",))

    labels = labels_of(batch)
    if task.medium == "preferences":
        return SAMPLES
    if labels is None or labels.is_floating_point() or task.labels == "transcript":
        return SAMPLES
    columns = "next" if task.predicts_next_token and labels.dim() >= 2 else "all"
    return Count("unequal", ("labels",), columns=columns)


def loss_count(workload: Workload, batch: Any) -> float:
    """The number of terms in the mean loss of a batch, its weight among the slices of a larger batch."""
    if workload.count is not None:
        return workload.count(batch)
    return counted(count_of(workload, batch), batch, workload.split)


def counts_samples(workload: Workload, batch: Any) -> bool:
    """Whether the terms in the mean loss of such a batch are its samples."""
    return workload.count is None and count_of(workload, batch).kind in ("samples", "sum")


def counted_slices(workload: Workload, batch: Any, size: int) -> list[tuple[Any, float]]:
    """The slices of a batch, each with the number of terms in its loss; without those that have no mean (0/0)."""
    slices = ((part, loss_count(workload, part)) for part in split(batch, size, workload.split))
    return [(part, count) for part, count in slices if count]


def weight_of(workload: Workload, count: float, total: float) -> float:
    """The weight of a slice in the loss of a batch, by the terms in both."""
    return 1.0 if is_sum(workload) else count / total


def is_sum(workload: Workload) -> bool:
    """Whether the loss of a batch is the sum of its samples' losses, not a mean."""
    found = workload.traits.count if workload.traits else None
    return workload.reduction == "sum" or (found is not None and found.kind == "sum")


def counted(count: Count, batch: Any, split: Callable[[Any, int], Any] | None = None) -> float:
    """The number of terms that this count finds in a batch."""
    if count.kind in ("samples", "sum"):
        return sample_count(batch, split)

    found = 0.0
    masks = None if count.mask is None else list(_at(batch, count.mask))
    for number, tensor in enumerate(_at(batch, count.path)):
        entries = _columns(tensor, count.columns)
        if count.kind == "elements":
            found += entries.numel()
            continue
        if count.kind == "total":
            found += float(entries.sum(dtype=torch.float64))
            continue
        counts = entries != count.value
        if masks is not None:
            counts = counts & (_columns(masks[number], count.columns) != 0)
        found += int(counts.sum())
    return found


def candidates(batch: Any) -> list[Count]:
    """Every count that the tensors of a batch offer, the likeliest first."""
    found = [SAMPLES, Count("sum")]
    labels = []
    masks = []
    for path, tensor in paths(batch):
        if not 0 < tensor.dim() <= _MOST_DIMS:
            continue
        if is_mask(tensor):
            masks.append((path, tensor))
        elif not tensor.is_floating_point():
            labels.append((path, tensor))
            if (
                tensor.dim() == 1
                and bool((tensor >= 0).all())
                and any(word in str(path[-1:]).lower() for word in _SIZES)
            ):
                found.append(Count("total", path))
        elif tensor.dim() <= 2 and bool((tensor >= 0).all()):
            found.append(Count("total", path))
        if EACH in path or layout_of(batch) is not None:
            found.append(Count("elements", path))

    for path, tensor in labels:
        for value in dict.fromkeys((*_IGNORED, *_paddings(tensor))):
            found += [Count("unequal", path, value, columns) for columns in _windows(tensor)]
    for path, tensor in masks:
        found += [Count("unequal", path, 0, columns) for columns in _windows(tensor)]
        for other, given in labels:
            if given.shape == tensor.shape:
                columns = _windows(tensor)
                found += [
                    Count("unequal", other, IGNORED_LABEL, each, mask=path) for each in columns
                ]
    return found


def paths(
    batch: Any, path: _Path = (), lists: frozenset[int] | None = None
) -> Iterator[tuple[_Path, torch.Tensor]]:
    """The tensors of a batch, each with its path; of a list with an item for each sample the first one's."""
    if lists is None:
        layout = layout_of(batch)
        lists = layout.lists if layout else frozenset()

    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, Mapping | UserDict):
        for key, value in batch.items():
            yield from paths(value, (*path, key), lists)
    elif id(batch) in lists:
        yield from paths(batch[0], (*path, EACH), lists)
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from paths(value, (*path, index), lists)
    elif hasattr(batch, "__dataclass_fields__"):
        for name in batch.__dataclass_fields__:
            yield from paths(getattr(batch, name), (*path, name), lists)


def _paddings(tensor: torch.Tensor) -> list[int]:
    """The value that most rows end with, where some begin with another: probably that of padding."""
    if tensor.dim() < 2 or not tensor.numel():
        return []
    return [int(tensor[:, -1].flatten().mode().values)]


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether it holds zeros and ones alone, and both, or is of booleans."""
    if tensor.dtype == torch.bool:
        return True
    is_binary = bool(((tensor == 0) | (tensor == 1)).all())
    return is_binary and tensor.dim() > 1


def _at(batch: Any, path: _Path) -> Iterator[torch.Tensor]:
    """The tensors that a path leads to."""
    if not path:
        yield batch
        return
    key, *rest = path
    if key == EACH:
        for item in batch:
            yield from _at(item, tuple(rest))
        return
    is_indexed = isinstance(batch, Mapping | UserDict | list | tuple)
    yield from _at(batch[key] if is_indexed else getattr(batch, key), tuple(rest))


def _columns(tensor: torch.Tensor, columns: str) -> torch.Tensor:
    if columns == "next":
        return tensor[:, 1:]
    if columns == "earlier":
        return tensor[:, :-1]
    return tensor


def _windows(tensor: torch.Tensor) -> tuple[str, ...]:
    """The columns that a loss may use: one of texts predicts next tokens, whose labels are shifted."""
    return ("all", "next", "earlier") if tensor.dim() >= 2 and tensor.shape[1] > 1 else ("all",)
