"""What a mean loss may run over, counted in batches: samples, valid labels, tokens that are no
padding.

`candidates` lists what the tensors of a batch offer; `training.equal_work` finds out which of them
a loss uses.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autofit.core.tasks import TASKS
from autofit.core.workload import EACH, Count, Workload
from autofit.data.batch import IGNORED_LABEL, labels_of, sample_count, split
from autofit.data.layouts import layout_of

SAMPLES = Count()
# Labels that losses leave out: torch's default, and what data sets pad labels with.
_IGNORED = (IGNORED_LABEL, -1, 0, 255)
_SIZES = (
    "len",
    "size",
    "count",
    "num",
)  # in the names of tensors that hold the sizes of samples
_MOST_DIMS = 4  # of tensors of labels: those of videos' pixels
_Path = tuple[Any, ...]


def count_of(workload: Workload, batch: Any) -> Count:
    """What the workload's mean loss runs over: what was proven, else what its task says."""
    if workload.traits and workload.traits.count:
        return workload.traits.count
    return by_task(workload, batch)


def by_task(workload: Workload, batch: Any) -> Count:
    """What a loss of this task runs over.

    Causal language models predict the *next* token, so the first label of each row is never used:
    counting it puts the gradient 8 % off with uneven padding (measured). Other integer labels per
    token count where they are valid. Anything else counts samples, also CTC: its loss is divided by
    each sample's own number of labels.
    """
    task = TASKS[workload.task]
    # transformers prefers these labels to others.
    if task.predicts_next_token and labels_of(batch, "shift_labels") is not None:
        return Count("unequal", ("shift_labels",))

    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return SAMPLES
    if task.medium == "preferences" or task.labels == "transcript":
        return SAMPLES

    columns = "all"
    if task.predicts_next_token and labels.dim() >= 2:
        columns = "next"
    return Count("unequal", ("labels",), columns=columns)


def loss_count(workload: Workload, batch: Any) -> float:
    """The terms in the mean loss of a batch: its weight among the slices of a larger one."""
    if workload.count is not None:
        return workload.count(batch)
    return counted(count_of(workload, batch), batch, workload.split)


def counts_samples(workload: Workload, batch: Any) -> bool:
    """Whether the terms in the mean loss of such a batch are its samples."""
    return workload.count is None and count_of(workload, batch).kind in ("samples", "sum")


def counted_slices(workload: Workload, batch: Any, size: int) -> list[tuple[Any, float]]:
    """The slices of a batch, each with the number of terms in its loss.

    Slices without any are left out: they have no mean (0/0).
    """
    slices = []
    for part in split(batch, size, workload.split):
        count = loss_count(workload, part)
        if count:
            slices.append((part, count))

    return slices


def weight_of(workload: Workload, count: float, total: float) -> float:
    """The weight of a slice in the loss of a batch, by the terms in both."""
    if is_sum(workload):
        return 1.0
    return count / total


def is_sum(workload: Workload) -> bool:
    """Whether the loss of a batch is the sum of its samples' losses, not a mean."""
    if workload.reduction == "sum":
        return True
    if workload.traits is None or workload.traits.count is None:
        return False
    return workload.traits.count.kind == "sum"


def counted(count: Count, batch: Any, split: Callable[[Any, int], Any] | None = None) -> float:
    """The number of terms that this count finds in a batch."""
    if count.kind in ("samples", "sum"):
        return sample_count(batch, split)

    masks = None
    if count.mask is not None:
        masks = list(_at(batch, count.mask))

    found = 0.0
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
            mask = _columns(masks[number], count.columns)
            counts = counts & (mask != 0)
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
        else:
            if not tensor.is_floating_point():
                labels.append((path, tensor))
            if _may_be_total(path, tensor):
                found.append(Count("total", path))

        if EACH in path or layout_of(batch) is not None:
            found.append(Count("elements", path))

    for path, tensor in labels:
        for value in dict.fromkeys((*_IGNORED, *_paddings(tensor))):
            found += [Count("unequal", path, value, columns) for columns in _windows(tensor)]

    for path, tensor in masks:
        windows = _windows(tensor)
        found += [Count("unequal", path, 0, columns) for columns in windows]
        for other, numbers in labels:
            if numbers.shape != tensor.shape:
                continue
            for columns in windows:
                count = Count("unequal", other, IGNORED_LABEL, columns, mask=path)
                found.append(count)

    return found


def _may_be_total(path: _Path, tensor: torch.Tensor) -> bool:
    """Whether a loss may be divided by the sum of a tensor: of weights, or of samples' sizes."""
    if tensor.is_floating_point():
        may_be = tensor.dim() <= 2
    else:
        name = str(path[-1:]).lower()
        may_be = tensor.dim() == 1 and any(word in name for word in _SIZES)

    if not may_be:
        return False
    return bool((tensor >= 0).all())


def paths(
    batch: Any,
    path: _Path = (),
    lists: frozenset[int] | None = None,
) -> Iterator[tuple[_Path, torch.Tensor]]:
    """The tensors of a batch, each with its path.

    Of a list with an item for each sample, the tensors of the first item.

    Args:
        lists: ids of such lists; found out if None.
    """
    if lists is None:
        layout = layout_of(batch)
        lists = layout.lists if layout else frozenset()

    if isinstance(batch, torch.Tensor):
        yield path, batch
        return

    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif id(batch) in lists:
        items = [(EACH, batch[0])]
    elif isinstance(batch, list | tuple):
        items = enumerate(batch)
    elif hasattr(batch, "__dataclass_fields__"):
        items = [(name, getattr(batch, name)) for name in batch.__dataclass_fields__]

    for key, value in items:
        yield from paths(value, (*path, key), lists)


def _paddings(tensor: torch.Tensor) -> list[int]:
    """The value that most rows end with, which is probably that of padding."""
    if tensor.dim() < 2 or not tensor.numel():
        return []
    return [int(tensor[:, -1].flatten().mode().values)]


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether it is of booleans, or holds zeros and ones alone in two dimensions or more."""
    if tensor.dtype == torch.bool:
        return True
    is_binary = bool(((tensor == 0) | (tensor == 1)).all())

    return is_binary and tensor.dim() > 1


def _at(batch: Any, path: _Path) -> Iterator[torch.Tensor]:
    """The tensors that a path leads to."""
    if not path:
        yield batch
        return

    key = path[0]
    if key == EACH:
        items = batch
    elif isinstance(batch, Mapping | list | tuple):
        items = [batch[key]]
    else:
        items = [getattr(batch, key)]

    for item in items:
        yield from _at(item, path[1:])


def _columns(tensor: torch.Tensor, columns: str) -> torch.Tensor:
    """The columns that count."""
    if columns == "next":
        return tensor[:, 1:]
    if columns == "earlier":
        return tensor[:, :-1]

    return tensor


def _windows(tensor: torch.Tensor) -> tuple[str, ...]:
    """The columns that a loss may use: one that predicts next tokens shifts its labels."""
    is_per_token = tensor.dim() >= 2 and tensor.shape[1] > 1
    if not is_per_token:
        return ("all",)
    return ("all", "next", "earlier")
