"""Batches of any structure: their samples, their micro-batches, and what their loss counts.

A batch is a tensor, or a dict, tuple, list, named tuple, dataclass or mapping-like object
(transformers' BatchEncoding) of tensors and such containers. Every tensor with dimensions has the
samples along dim 0, unless its layout is known or the workload splits its batches; a list of other
things (texts) as long as there are samples holds one for each.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import torch

from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.workload import Workload
from autofit.data.layouts import Layout, layout_of
from autofit.data.options import IGNORED_LABEL as IGNORED_LABEL

# Workload.split: (batch, size) -> micro-batches of that many samples
Cut = Callable[[Any, int], Any]
_SPLIT = (
    "say with split=... how to split it: a function of (batch, size) that returns a list of "
    "micro-batches"
)


def map_tensors(
    batch: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    lists: Callable[[Any], Any] = lambda items: items,
    whole: Set[int] = frozenset(),
) -> Any:
    """The same batch with `function` applied to every tensor.

    Args:
        lists: applied to lists without tensors (of texts), to tuples of texts, which a DataLoader
            makes of samples that are tuples, and to the lists in `whole`.
        whole: ids of lists.
    """

    def inner(value: Any) -> Any:
        return map_tensors(value, function, lists=lists, whole=whole)

    if isinstance(batch, torch.Tensor):
        return function(batch)

    if isinstance(batch, Mapping):
        items = {key: inner(value) for key, value in batch.items()}
        if isinstance(batch, UserDict):  # BatchEncoding takes its data as first argument
            return type(batch)(items)
        try:
            return type(batch)(items)  # type: ignore[call-arg]
        except TypeError:  # a type that cannot be made from a dict
            return items

    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))

    if isinstance(batch, list | tuple):
        if type(batch) is list:
            is_whole = id(batch) in whole or not tensors(batch)
        else:
            is_whole = type(batch) is tuple and _are_texts(batch)

        if is_whole:
            return lists(batch)
        return type(batch)(map(inner, batch))

    names = _fields(batch)
    if names is None:
        return batch
    return dataclasses.replace(batch, **{name: inner(getattr(batch, name)) for name in names})


def _are_texts(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, str | bytes) for item in items)


def _fields(batch: Any) -> list[str] | None:
    """The fields that a dataclass is made of; None for anything else."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return None
    return [field.name for field in dataclasses.fields(batch) if field.init]


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]

    parts: Iterable[Any]
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        parts = [getattr(batch, name) for name in _fields(batch) or ()]

    found = []
    for part in parts:
        found += tensors(part)
    return found


def by_rows(batch: Any, size: int) -> list[Any]:
    """The `Workload.split` of batches that are known to have the samples along dim 0.

    It is for batches in which positions start again within a row: one such row alone would be taken
    for several samples.
    """
    return list(_slices(batch, size, None, _counted(batch, None)))


def has_rows(batch: Any, cut: Cut | None = None) -> bool:
    """Whether the samples of a batch are the rows of its tensors."""
    return not is_own(cut) and _layout(batch, cut) is None


def is_own(cut: Cut | None) -> TypeGuard[Cut]:
    """Whether it is a function of the user's, which alone knows the samples."""
    return cut is not None and cut is not by_rows


def _layout(batch: Any, cut: Cut | None) -> Layout | None:
    """The layout of a batch; None where its samples are rows."""
    if cut is by_rows:
        return None
    return layout_of(batch)


def sample_count(batch: Any, cut: Cut | None = None) -> int:
    """The number of samples: as the layout says, or the size of dim 0, on which all tensors must
    agree."""
    if is_own(cut):
        return len(_parts(batch, 1, cut))
    return _counted(batch, _layout(batch, cut))


def _counted(batch: Any, layout: Layout | None) -> int:
    """The number of samples of a batch with this layout.

    Raises:
        InputError: there are no tensors with samples, or their sizes differ.
    """
    if layout:
        return len(layout.sizes)

    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim()}
    if len(sizes) == 1:
        return int(sizes.pop())
    if sizes:
        message = f"the tensors of a batch differ in size along dim 0: {sorted(sizes)}."
        raise InputError(message, f"Put the samples along dim 0 of every tensor, or {_SPLIT}.")

    message = f"the batch (a {type(batch).__name__}) holds no tensor with samples along dim 0"
    remedy = f"Give tensors, or a dict, tuple, list or dataclass of them, or {_SPLIT}."
    lists = []
    if isinstance(batch, Mapping):
        lists = [str(name) for name, part in batch.items() if isinstance(part, list)]
    if lists:  # rows of the library `datasets`
        verb = "is a list" if len(lists) == 1 else "are lists"
        message += f": {' and '.join(lists)} {verb}"
        remedy = f'dataset.set_format("torch") makes tensors of lists. {remedy}'

    raise InputError(f"{message}.", remedy)


def split(batch: Any, size: int, cut: Cut | None = None) -> Iterator[Any]:
    """Micro-batches of `size` samples, the last one shorter when it does not divide."""
    if is_own(cut):
        yield from _parts(batch, size, cut)
        return

    layout = _layout(batch, cut)
    total = _counted(batch, layout)
    if size >= total:
        yield batch
    else:
        yield from _slices(batch, size, layout, total)


def _slices(
    batch: Any,
    size: int,
    layout: Layout | None,
    total: int,
) -> Iterator[Any]:
    """Slices of `size` of all samples, as views."""
    for start in range(0, total, size):
        yield _take(
            batch,
            range(start, min(start + size, total)),
            layout,
            total,
        )


def samples_of(
    batch: Any,
    start: int,
    stop: int,
    cut: Cut | None = None,
) -> Any:
    """Samples `start` to `stop` of a batch, as views of it.

    With a user's `cut`, which makes slices of one size, those behind `start` are no more than those
    before it, unless `start` is 0.
    """
    if is_own(cut):
        begun = _parts(batch, stop, cut)[0]
        if not start:
            return begun
        return _parts(begun, start, cut)[1]

    return take_samples(batch, range(start, stop), cut)


def take_samples(batch: Any, samples: Sequence[int], cut: Cut | None = None) -> Any:
    """These samples of a batch in this order; with a user's `cut`, they must follow each other."""
    if is_own(cut):
        return samples_of(batch, samples[0], samples[-1] + 1, cut)
    layout = _layout(batch, cut)

    return _take(batch, samples, layout, _counted(batch, layout))


def repeat_to(batch: Any, samples: int, cut: Cut | None = None) -> Any:
    """A batch of exactly `samples` samples, made by repeating and cutting the one given.

    Of samples that differ in size the largest one is repeated.
    """
    if is_own(cut):
        total = sample_count(batch, cut)
        if samples <= total:
            return samples_of(batch, 0, samples, cut)
        message = (
            f"a batch of {samples} samples cannot be made from one of {total}, which only split= "
            "understands."
        )
        raise InputError(message, "Give larger batches.")

    layout = _layout(batch, cut)
    total = _counted(batch, layout)
    chosen = [index % total for index in range(samples)]
    if layout and samples != total:
        largest = layout.sizes.index(max(layout.sizes))
        chosen = [largest] * samples

    return _take(batch, chosen, layout, total)


def _take(
    batch: Any,
    samples: Sequence[int],
    layout: Layout | None,
    total: int,
) -> Any:
    """These of all samples of a batch with this layout; a range as views."""
    layout = layout or Layout(())
    rows = slice(samples.start, samples.stop) if isinstance(samples, range) else list(samples)

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        take = layout.takes.get(id(tensor))
        if take:
            return take(samples)
        return tensor[rows] if tensor.dim() else tensor

    def of_list(items: Any) -> Any:
        if len(items) != total:
            return items
        return type(items)(items[sample] for sample in samples)

    return map_tensors(batch, of_tensor, lists=of_list, whole=layout.lists)


def _parts(batch: Any, size: int, cut: Cut) -> list[Any]:
    """What the user's own function splits a batch into.

    Raises:
        InputError: the function failed, or returned something else than parts.
    """
    with as_input_error(
        lambda error: f"split raised {describe_error(error)}.", "Correct it there."
    ):
        parts = cut(batch, size)

    if isinstance(parts, list | tuple) and parts:
        return list(parts)

    given = f"a {type(parts).__name__}"
    if isinstance(parts, list | tuple):
        given = f"an empty {type(parts).__name__}"
    raise InputError(f"split returned {given}, not a list of micro-batches.", "Return a list.")


def labels_of(batch: Any, name: str = "labels") -> torch.Tensor | None:
    """The batch's tensor of that name, if it has one."""
    value = None
    if isinstance(batch, Mapping):
        value = batch.get(name)
    elif hasattr(batch, name):
        value = getattr(batch, name)

    if not isinstance(value, torch.Tensor):
        return None
    return value


def few_samples(workload: Workload, samples: int, batch: Any = None) -> Any:
    """So many samples to try the loss on, at most all.

    Packed samples are taken from a whole batch, because they differ in size: a smaller batch may
    hold the largest of them again and again.

    Args:
        batch: of so many samples; one of the workload's if None.
    """
    whole = workload.effective_batch_size
    samples = min(samples, whole)
    if batch is None:
        batch = workload.batch(samples)
    if has_rows(batch, workload.split):
        return batch

    return samples_of(workload.batch(whole), 0, samples, workload.split)


def own_samples(
    batch: Any,
    part: int,
    parts: int,
    cut: Cut | None = None,
) -> tuple[Any, bool]:
    """One of several equal parts of a batch, the last ones smaller where it does not divide.

    Returns:
        The part and True; the batch's first sample and False for a part without samples.
    """
    total = sample_count(batch, cut)
    size = -(-total // parts)
    start = part * size
    if start >= total:
        return samples_of(batch, 0, 1, cut), False

    return samples_of(batch, start, min(start + size, total), cut), True
