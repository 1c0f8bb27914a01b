"""A model and a data loader, as `fit` gets them, become a Workload; and passes over loaders of any
kind."""

import contextlib
import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from autofit.core.errors import InputError, as_input_error, is_whole, require, sentence
from autofit.core.tasks import TASKS, task_of
from autofit.core.tasks.custom import CUSTOM
from autofit.core.workload import REFERENCE, Rows, Workload, reduction_of
from autofit.data.batch import (
    Cut,
    by_rows,
    has_rows,
    is_own,
    labels_of,
    map_tensors,
    repeat_to,
    sample_count,
    tensors,
)
from autofit.data.layouts import layout_of, positions_in_rows
from autofit.data.samples import FileLoader
from autofit.data.trial_batches import TRIAL_SAMPLES, most_different, variety
from autofit.training import random_state
from autofit.training.default_loss import check_call, check_loss_function
from autofit.training.inspect import blamed_on
from autofit.training.longest_batch import longest_batch
from autofit.training.meta_model import meta_copy

_Loss = Callable[[Any, Any], Any]
_Optimizer = Callable[[Any], Any]  # makes one of parameter groups
_FORM_BATCHES = 4  # show whether a row is one sample or several
_FEW_SHAPES = 8  # such as those of buckets: planning once for each of them pays
_PAD = "Give a collate_fn that pads them, such as transformers.DataCollatorForSeq2Seq(tokenizer)."
_NOT_COPIED = (
    "Take that out of the model, or search with autofit.Workload(model=...) and a function that "
    "makes it."
)


@dataclass(frozen=True)
class Peek:
    """How to find the largest batch: the one given, or the largest of the loader's first ones."""

    worst_case: Any = None
    batches: int = 64

    def __post_init__(self) -> None:
        is_fine = is_whole(self.batches, 1) and self.batches <= sys.maxsize
        require(is_fine, "peek must be a positive whole number of batches", self.batches)


@dataclass(frozen=True)
class LargestBatch:
    """The batch factory of a loader: repeats the samples of its largest batch.

    `differing` are a few samples of any batch that differ as much as any, on which a loss is tried.
    """

    largest: Any
    differing: Any
    cut: Cut | None

    def __call__(self, samples: int) -> Any:
        return repeat_to(self.largest, samples, self.cut)


@dataclass(frozen=True)
class _AsAsked:
    """A user's batch factory that marks rows as samples, where it gives as many as are asked
    for."""

    batch: Callable[[int], Any]

    def __call__(self, samples: int) -> Any:
        made = self.batch(samples)
        positions = positions_in_rows(made)
        if type(made) is dict and positions is not None and len(positions) == samples:
            return Rows(made)
        return made


def with_known_rows(workload: Workload) -> Workload:
    """A workload of the user's own whose batches keep to one layout, also those of a single row."""
    # whose batches are marked as they are made
    is_named = workload.source.get("kind", "function") != "function"
    if workload.split is not None or is_named:
        return workload
    return dataclasses.replace(workload, batch=_AsAsked(workload.batch))


def without_weights(workload: Workload, model: nn.Module) -> Workload:
    """The workload with copies of its models that have no weights, for other processes."""
    frozen: dict[str, Any] = {}
    with blamed_on("copying the model's structure", _NOT_COPIED):
        structure = meta_copy(model)
        for name, factory in workload.frozen.items():
            frozen[name] = factory
            if isinstance(factory, _Given):
                frozen[name] = _Given(meta_copy(factory.model))
    # each probe unpickles its own
    return dataclasses.replace(workload, model=lambda: structure, frozen=frozen)


@dataclass(frozen=True)
class _Given:
    """() -> a model of the user's."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return self.model


def _frozen_models(loss: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The models that a loss asks, by name: functions that make them, or None for a copy."""
    require(
        given is None or isinstance(given, Mapping),
        "frozen must be a mapping of names to models",
        given,
        'For example frozen={"teacher": teacher}.',
    )
    models = {**getattr(loss, "frozen", {}), **(given or {})}
    return {
        name: _Given(model) if isinstance(model, nn.Module) else model
        for name, model in models.items()
    }


def workload_from(model: nn.Module, loader: Any, loss: _Loss | None, **options: Any) -> Workload:
    """The workload of a search for training `model` on `loader`.

    It has the options of `training_workload`; probes get a copy of the model without weights.
    """
    return without_weights(training_workload(model, loader, loss, **options), model)


def training_workload(
    model: nn.Module,
    loader: Any,
    loss: _Loss | None,
    *,
    optimizer: _Optimizer | None = None,
    split: Cut | None = None,
    count: Callable[[Any], float] | None = None,
    frozen: Mapping[str, Any] | None = None,
    peek: Peek | None = None,
) -> Workload:
    """The workload of training `model` itself on `loader`, whose batch size is the effective batch.

    Reads the first batches to find the largest shape; the model is not touched. Raises InputError
    for a model, loader or function that cannot be trained with.
    """
    _check_model(model)
    check_loss_function(loss)
    _check_function(split, "split must be a function of (batch, size)")
    _check_function(count, "count must be a function of a batch")

    peek = peek or Peek()
    with put_back(loader):
        seen = _inspect(loader, peek, split)
    if loss is None:
        check_call(model, seen.largest)

    sequence_length = _sequence_length(repeat_to(seen.largest, 1, seen.cut))
    unit = "samples"
    packing = None
    if sequence_length:
        unit = "tokens"
        if seen.padding:
            packing = False
    document_tokens = None
    if seen.cut is by_rows:
        document_tokens = _document_tokens(seen.largest)

    task = TASKS.get(getattr(loss, "task", ""), task_of(model))
    if task.predicts_next_token and labels_of(seen.largest) is None:  # it has none to shift
        task = CUSTOM
    reduction = "mean"
    if not loss:
        reduction = reduction_of(task, getattr(model, "config", None))

    return Workload(
        model=lambda: model,
        batch=LargestBatch(map_tensors(seen.largest, _on_host), seen.varied, seen.cut),
        loss=loss,
        frozen=_frozen_models(loss, frozen),
        precomputes=_entry(seen.largest, REFERENCE) is not None,
        optimizer=optimizer,
        split=seen.cut,
        count=count,
        effective_batch_size=seen.samples,
        varying=len(seen.shapes) > _FEW_SHAPES,
        packing=packing,
        padding=seen.padding,
        unit=unit,
        sequence_length=sequence_length,
        document_tokens=document_tokens,
        task=task.name,
        name=type(model).__name__,
        reduction=reduction,
        notes=(seen.unread,) if seen.unread else (),
    )


def _check_function(function: Any, message: str) -> None:
    """Raise an InputError for other than a function or None."""
    require(function is None or callable(function), message, function, "Leave it out.")


def _check_model(model: Any) -> None:
    """Raise an InputError for what is no model, or one that cannot be trained as it is."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InputError(
            f"the model must be an nn.Module or the name of one, not a {kind}.",
            "Pass the model itself, or an autofit.Workload.",
        )

    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError(
            "the model has scripted modules (torch.jit), whose weights cannot be replaced.",
            "Give the module that they were made of.",
        )

    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        raise InputError(
            "the model has weights on the meta device: there is nothing to train.",
            "Load them first.",
        )

    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise InputError(
            "the model has lazy modules, whose weights have no shape yet.",
            "Call it on a batch once, before it is given away.",
        )

    if len(devices) > 1:
        raise InputError(
            f"the model's weights are spread over {' and '.join(devices)}; autofit trains on one "
            "device.",
            "Load it without a device_map.",
        )


def _sequence_length(batch: Any) -> int | None:
    """The tokens of each sample in a batch; None for other than token ids."""
    ids = _entry(batch, "input_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() == 2:
        return int(ids.shape[1])
    return None


def _document_tokens(batch: Any) -> int | None:
    """The mean length of the samples that are packed into rows; None where each row is one."""
    positions = positions_in_rows(batch)
    if positions is None or not (positions[:, 1:] == 0).any():
        return None
    return max(1, round(positions.numel() / int((positions == 0).sum())))


def _has_keys(batch: Any) -> bool:
    """Whether a batch is a mapping, or looks as one."""
    return isinstance(batch, Mapping) or hasattr(batch, "keys")


def _entry(batch: Any, key: str) -> Any:
    """What a batch has at a key; None where it has none."""
    if not _has_keys(batch):
        return None
    return batch.get(key)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, in host memory."""
    return tensor.detach().cpu()


@dataclass
class _Inspection:
    """What the first batches of a loader are."""

    cut: Cut | None  # how they are split
    largest: Any = None  # the one with the largest samples
    varied: Any = None  # a few samples that differ much
    variety: float = -1.0  # of these
    structure: str = ""
    batches: int = 0  # that were read
    samples: int = 0  # the most that a batch has
    shapes: set[tuple[Any, ...]] = field(default_factory=set)  # of samples
    tokens: int = 0  # by masks of attention
    attended: int = 0  # of these, those that are no padding
    unread: str = ""  # a sentence where there may be longer samples

    @property
    def padding(self) -> float:
        """The share of padding."""
        if not self.tokens:
            return 0.0
        return 1 - self.attended / self.tokens

    def add(self, batch: Any) -> None:
        """Look at one more batch; raises InputError where its structure is another one."""
        cut = self.cut
        self.structure = self.structure or _structure(batch)
        _check_structure(batch, self.structure, f"batch {self.batches} of the loader")
        self.batches += 1

        samples = sample_count(batch, cut)
        self.samples = max(self.samples, samples)
        if samples > 1 and not is_own(cut):
            found = variety(batch)
            if found > self.variety:
                self.variety = found
                differing = most_different(batch, TRIAL_SAMPLES)
                self.varied = map_tensors(differing, lambda tensor: _on_host(tensor).clone())

        mask = _entry(batch, "attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self.tokens += mask.numel()
            self.attended += int((mask != 0).sum())

        layout = None
        if not has_rows(batch, cut):
            layout = layout_of(batch)

        shapes = [tensor.shape[1:] for tensor in tensors(batch)]
        self.shapes.add((layout and tuple(layout.sizes), *shapes))

        # Per sample: the last batch may hold few samples that are the longest.
        elements = _elements_per_sample(batch, cut)
        if self.largest is None or elements > _elements_per_sample(self.largest, cut):
            self.largest = batch


def _inspect(loader: Any, peek: Peek, cut: Cut | None) -> _Inspection:
    """Read the first batches of a loader.

    Holds few of them at a time: each that comes from a worker takes shared memory and open files.
    """
    batches = batches_of(loader)
    peeked: Iterator[Any] = itertools.islice(_collated(batches), peek.batches)
    if cut is None:
        first = list(itertools.islice(peeked, 1))
        if first and positions_in_rows(first[0]) is not None:
            first += itertools.islice(peeked, _FORM_BATCHES - 1)
            if _are_rows(first, loader):
                cut = by_rows
        peeked = itertools.chain(_given_away(first), peeked)

    seen = _Inspection(cut)
    for batch in peeked:
        seen.add(batch)
    if seen.largest is None:
        raise InputError("the loader is empty: it gave no batch.", "Check the data set.")

    # a DataLoader would start workers
    if not isinstance(loader, DataLoader) and batches_of(loader) is batches:
        raise _read_once(f"the loader gives the same {type(batches).__name__} again")

    if peek.worst_case is not None:
        _check_structure(peek.worst_case, seen.structure, "worst_case")
        seen.largest = peek.worst_case
    elif peek.batches <= seen.batches != length_of(loader):
        _look_beyond(loader, peek, seen)

    if is_own(cut):  # only a whole batch can be made as large
        seen.samples = sample_count(seen.largest, cut)
    return seen


def _look_beyond(loader: Any, peek: Peek, seen: _Inspection) -> None:
    """Find the longest samples among those that the first batches do not have.

    A sentence says where there may be longer ones yet.
    """
    differ = len(seen.shapes) > 1
    found = None
    if differ or isinstance(loader, FileLoader):
        found = longest_batch(loader)

    read = f"no more than {peek.batches} batches of the loader"
    if found is not None:
        _check_structure(found.batch, seen.structure, "the batch of the longest samples")
        cut = seen.cut
        is_larger = _elements_per_sample(found.batch, cut) > _elements_per_sample(seen.largest, cut)
        # the samples of a user's own cut cannot be repeated
        if is_larger and not (is_own(cut) and sample_count(found.batch, cut) < seen.samples):
            seen.largest = found.batch
        read = f"no more than {found.read:,} of {found.samples:,} samples of the data set"

    if differ and (found is None or found.read < found.samples):
        seen.unread = (
            f"{read} were read to find the longest samples: a longer one may need more memory than "
            "is measured (fit takes worst_case= and peek=)."
        )


def _collated(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader; an InputError where torch's collate_fn cannot stack its samples."""
    with as_input_error(
        lambda error: f"the loader cannot stack its samples: {sentence(error)}.",
        _PAD,
        but=lambda error: not isinstance(error, RuntimeError) or "equal size" not in str(error),
    ):
        yield from batches


def _given_away(items: list[Any]) -> Iterator[Any]:
    """Each item in turn, which the list then no longer holds."""
    while items:
        yield items.pop(0)


def _are_rows(batches: list[Any], loader: Any) -> bool:
    """Whether each row of these batches is one sample, although positions start again in it.

    One batch of one row does not show it: DataCollatorWithFlattening puts all samples of a batch
    into one row, and a packer fills rows, which a loader may then give one at a time. But several
    rows in any batch are samples; so is one where the loader puts a single item into a batch; and
    rows of one length that are divided differently were filled by a packer.
    """
    if isinstance(loader, DataLoader) and loader.batch_size == 1:
        return True

    lengths = set()
    divisions = set()
    for batch in batches:
        positions = positions_in_rows(batch)
        if positions is None:
            continue
        if len(positions) > 1:
            return True
        lengths.add(positions.shape[1])
        divisions.add(tuple((positions[0] == 0).nonzero().flatten().tolist()))
    return len(lengths) == 1 and len(divisions) > 1


def _check_structure(batch: Any, structure: str, name: str) -> None:
    """Raise an InputError for a batch that is structured in another way."""
    found = _structure(batch)
    if found != structure:
        raise InputError(
            f"{name} is {found}, but the first batch is {structure}.",
            "Give all batches the same structure.",
        )


def _structure(batch: Any, lists: Set[int] = frozenset()) -> str:
    """A batch's containers, keys and tensors in words; `lists`: the ids of lists of samples."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor of {batch.dim()} dimensions"

    if not lists:
        layout = layout_of(batch)
        if layout:
            lists = layout.lists

    if id(batch) in lists:
        return f"a list of {_structure(batch[0])}"

    if _has_keys(batch):
        keys = sorted(batch.keys(), key=str)
        entries = [f"{key}: {_structure(batch[key], lists)}" for key in keys]
        return f"{{{', '.join(entries)}}}"

    if isinstance(batch, tuple) or (isinstance(batch, list) and tensors(batch)):
        parts = [_structure(part, lists) for part in batch]
        return f"({', '.join(parts)})"
    return f"a {type(batch).__name__}"


def _elements_per_sample(batch: Any, cut: Cut | None) -> float:
    """The numbers that a sample is made of, in the mean where samples may differ."""
    samples = max(1, sample_count(batch, cut))
    if cut is None and layout_of(batch):
        batch = repeat_to(batch, 1)
        samples = 1
    return sum(tensor.numel() for tensor in tensors(batch)) / samples


def batches_of(loader: Any, *, name: str = "loader") -> Iterator[Any]:
    """A fresh pass over a loader: an iterable that can be read again, or a function that makes one.

    Raises InputError for a bare iterator, because its first batches would be lost to the search.
    """
    if callable(loader) and not isinstance(loader, Iterable):
        made = loader()
        require(
            hasattr(made, "__iter__"),
            f"the {name} must be a function that returns an iterator of batches",
            made,
        )
        return iter(made)

    kind = type(loader).__name__
    if not isinstance(loader, Iterable):
        raise InputError(
            f"the {name} must be an iterable of batches, not a {kind}.", "For example a DataLoader."
        )
    batches = iter(loader)  # once: it starts a DataLoader's workers and draws its seed

    if batches is loader:
        raise _read_once(f"the {name} is a {kind}")
    return batches


@contextlib.contextmanager
def put_back(loader: Any) -> Iterator[None]:
    """Undo what reading a loader moves.

    That is the random numbers of the process and of the loader itself, and the position of a loader
    that has a state.
    """
    with random_state.preserved(), random_state.generators_preserved(loader):
        state = None
        if is_stateful(loader):
            with contextlib.suppress(Exception):  # a loader may have no state before its first pass
                state = copy.deepcopy(loader.state_dict())
        try:
            yield
        finally:
            if state is not None:
                loader.load_state_dict(state)


def _read_once(what: str) -> InputError:
    """The error for a loader whose batches would be used up."""
    return InputError(
        f"{what}, which can be read only once: one look would use it up.",
        "Pass a function that returns it, or a DataLoader, or a list of batches.",
    )


def empty_pass() -> InputError:
    """The error for a pass that gives no batch although an earlier one did."""
    return InputError(
        "a pass over the loader gave no batch: it is empty, or can be read only once.",
        "Pass a DataLoader, a list of batches, or a function that returns a fresh iterator.",
    )


def is_stateful(loader: Any) -> bool:
    """Whether a loader saves and loads its position, by torchdata's protocol."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def samples_in_pass(loader: Any) -> int | None:
    """The number of samples in a loader's data set, where it is known without reading one."""
    if isinstance(loader, FileLoader):
        return length_of(loader.samples)
    return length_of(getattr(loader, "dataset", None))


def length_of(loader: Any) -> int | None:
    """The number of batches in a pass, where it is known without reading one."""
    try:
        return len(loader)
    # also of a DataLoader over an IterableDataset, which only looks as if it had a length
    except TypeError:
        return None
