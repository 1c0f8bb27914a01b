"""A model and a data loader, as `fit` gets them, become a Workload; and passes over loaders of any kind."""

import contextlib
import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from autofit.core.errors import InputError, as_input_error, is_whole, require, sentence
from autofit.core.tasks import task_of
from autofit.core.tasks.custom import CUSTOM
from autofit.core.workload import Rows, Workload, reduction_of
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
from autofit.training.meta_model import meta_copy

_Loss = Callable[[Any, Any], Any]
_Optimizer = Callable[[Any], Any]  # makes one of parameter groups
_FORM_BATCHES = 4  # show whether a row is one sample or several
_FEW_SHAPES = 8  # such as those of buckets: planning once for each of them pays
_PAD = "Give a collate_fn that pads them, such as transformers.DataCollatorForSeq2Seq(tokenizer)."
_NOT_COPIED = "Take that out of the model, or search with autofit.Workload(model=...) and a function that makes it."


@dataclass(frozen=True)
class Peek:
    """How to find the largest batch: the one given, or the largest of the loader's first `batches`."""

    worst_case: Any = None
    batches: int = 64

    def __post_init__(self) -> None:
        fine = is_whole(self.batches, 1) and self.batches <= sys.maxsize
        require(fine, "peek must be a positive whole number of batches", self.batches)


def workload_from(model: nn.Module, loader: Any, loss: _Loss | None, **options: Any) -> Workload:
    """The workload of a search for training `model` on `loader`, with the options of `training_workload`; probes get a
    copy of the model without weights."""
    return without_weights(training_workload(model, loader, loss, **options), model)


@dataclass(frozen=True)
class LargestBatch:
    """The batch factory of a loader: repeats the samples of its largest batch. `differing` are a few samples of any
    batch that differ as much as any, on which a loss is tried."""

    largest: Any
    differing: Any
    cut: Cut | None

    def __call__(self, samples: int) -> Any:
        return repeat_to(self.largest, samples, self.cut)


@dataclass(frozen=True)
class _AsAsked:
    """A user's batch factory: of `samples` rows that it gives when asked for as many, each is known to be a sample."""

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
    """The workload with a copy of its model that has no weights, for other processes."""
    with blamed_on("copying the model's structure", _NOT_COPIED):
        structure = meta_copy(model)
    return dataclasses.replace(workload, model=lambda: structure)  # each probe unpickles its own


def training_workload(
    model: nn.Module,
    loader: Any,
    loss: _Loss | None,
    *,
    optimizer: _Optimizer | None = None,
    split: Cut | None = None,
    count: Callable[[Any], float] | None = None,
    peek: Peek | None = None,
) -> Workload:
    """The workload of training `model` itself on `loader`, whose own batch size is the effective batch. Reads the first
    batches to find the largest shape; the model is not touched."""
    _check_model(model)
    check_loss_function(loss)
    require(
        split is None or callable(split),
        "split must be a function of (batch, size)",
        split,
        "Leave it out.",
    )
    require(
        count is None or callable(count),
        "count must be a function of a batch",
        count,
        "Leave it out.",
    )
    peek = peek or Peek()
    with put_back(loader):
        look = _look(loader, peek, split)
    largest = look.largest
    split = look.cut
    if loss is None:
        check_call(model, largest)
    one = repeat_to(largest, 1, split)
    ids = one.get("input_ids") if isinstance(one, Mapping) or hasattr(one, "keys") else None
    sequence_length = (
        int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None
    )
    task = task_of(model)
    if task.predicts_next_token and labels_of(largest) is None:  # it has none to shift
        task = CUSTOM
    return Workload(
        model=lambda: model,
        batch=LargestBatch(map_tensors(largest, _on_host), look.varied, split),
        loss=loss,
        optimizer=optimizer,
        split=split,
        count=count,
        effective_batch_size=look.samples,
        varying=look.shapes > _FEW_SHAPES,
        packing=False if look.padding and sequence_length else None,
        padding=look.padding,
        unit="tokens" if sequence_length else "samples",
        sequence_length=sequence_length,
        document_tokens=_document_tokens(largest) if split is by_rows else None,
        task=task.name,
        name=type(model).__name__,
        reduction="mean" if loss else reduction_of(task, getattr(model, "config", None)),
        notes=_unread(loader, peek, look),
    )


def _unread(loader: Any, peek: Peek, look: "_Look") -> tuple[str, ...]:
    """A sentence where samples differ in shape and the loader may give longer ones than those that were read."""
    is_all_read = look.batches < peek.batches or look.batches == length_of(loader)
    if look.shapes == 1 or is_all_read or peek.worst_case is not None:
        return ()
    return (
        f"no more than {peek.batches} batches of the loader were read to find the longest samples: a longer one may"
        " need more memory than is measured (fit takes worst_case= and peek=).",
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        message = (
            f"the model must be an nn.Module or the name of one, not a {type(model).__name__}."
        )
        raise InputError(message, "Pass the model itself, or an autofit.Workload.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        message = "the model has scripted modules (torch.jit), whose weights cannot be replaced."
        raise InputError(message, "Give the module that they were made of.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        raise InputError(
            "the model has weights on the meta device: there is nothing to train.",
            "Load them first.",
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        message = "the model has lazy modules, whose weights have no shape yet."
        raise InputError(message, "Call it on a batch once, before it is given away.")
    if len(devices) > 1:
        message = f"the model's weights are spread over {' and '.join(devices)}; autofit trains on one device."
        raise InputError(message, "Load it without a device_map.")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


@dataclass(frozen=True)
class _Look:
    """What the first batches of a loader are: the one with the largest samples, the most samples that a batch has, how
    many shapes samples have, the share of padding by masks of attention, how many batches were read, how they are
    split, and a few samples that differ much."""

    largest: Any
    samples: int
    shapes: int
    padding: float
    batches: int
    cut: Cut | None
    varied: Any


def _look(loader: Any, peek: Peek, cut: Cut | None) -> _Look:
    """Read the first batches of a loader. Holds few of them at a time: each that comes from a worker takes shared
    memory and open files."""
    largest: Any = None
    varied: Any = None
    most_variety = -1.0
    structure = ""
    samples = 0
    shapes = set()
    held = 0
    seen = 0
    read = 0
    batches = batches_of(loader)
    peeked: Iterator[Any] = itertools.islice(_collated(batches), peek.batches)
    if cut is None:
        first = list(itertools.islice(peeked, 1))
        if first and positions_in_rows(first[0]) is not None:
            first += itertools.islice(peeked, _FORM_BATCHES - 1)
            cut = by_rows if _are_rows(first, loader) else None
        peeked = itertools.chain(_given_away(first), peeked)
    for number, batch in enumerate(peeked):
        read = number + 1
        structure = structure or _structure(batch)
        _check_structure(batch, structure, f"batch {number} of the loader")
        samples = max(samples, sample_count(batch, cut))
        if (
            not is_own(cut)
            and sample_count(batch, cut) > 1
            and (found := variety(batch)) > most_variety
        ):
            most_variety = found
            varied = map_tensors(
                most_different(batch, TRIAL_SAMPLES), lambda tensor: _on_host(tensor).clone()
            )
        mask = (
            batch.get("attention_mask")
            if isinstance(batch, Mapping) or hasattr(batch, "keys")
            else None
        )
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            held = held + mask.numel()
            seen = seen + int((mask != 0).sum())
        layout = None if has_rows(batch, cut) else layout_of(batch)
        shapes.add(
            (layout and tuple(layout.sizes), *(tensor.shape[1:] for tensor in tensors(batch)))
        )
        # Per sample: the last batch may hold few samples that are the longest.
        if largest is None or _elements_per_sample(batch, cut) > _elements_per_sample(largest, cut):
            largest = batch
    if largest is None:
        raise InputError("the loader is empty: it gave no batch.", "Check the data set.")
    # a DataLoader would start workers
    if not isinstance(loader, DataLoader) and batches_of(loader) is batches:
        raise _read_once(f"the loader gives the same {type(batches).__name__} again")
    if peek.worst_case is not None:
        _check_structure(peek.worst_case, structure, "worst_case")
        largest = peek.worst_case
    if is_own(cut):  # only a whole batch can be made as large
        samples = sample_count(largest, cut)
    padding = 1 - seen / held if held else 0.0
    return _Look(largest, samples, len(shapes), padding, read, cut, varied)


def _collated(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader; an InputError where torch's own collate_fn cannot stack its samples."""
    with as_input_error(
        lambda error: f"the loader cannot stack its samples: {sentence(error)}.",
        _PAD,
        but=_is_no_stacking,
    ):
        yield from batches


def _is_no_stacking(error: BaseException) -> bool:
    return not isinstance(error, RuntimeError) or "equal size" not in str(error)


def _given_away(items: list[Any]) -> Iterator[Any]:
    """Each item in turn, which the list then no longer holds."""
    while items:
        yield items.pop(0)


def _are_rows(batches: list[Any], loader: Any) -> bool:
    """Whether each row of these batches is one sample, although positions start again in it. One batch of one row does
    not show it: DataCollatorWithFlattening puts all samples of a batch into one row, and a packer fills rows, which a
    loader may then give one at a time. But several rows in any batch are samples; so is one where the loader puts a
    single item into a batch; and rows of one length that are divided differently were filled by a packer."""
    found = [positions_in_rows(batch) for batch in batches]
    positions = [each for each in found if each is not None]
    if any(len(each) > 1 for each in positions):
        return True
    if isinstance(loader, DataLoader) and loader.batch_size == 1:
        return True

    lengths = {each.shape[1] for each in positions}
    divisions = {tuple((each[0] == 0).nonzero().flatten().tolist()) for each in positions}
    return len(lengths) == 1 and len(divisions) > 1


def _document_tokens(batch: Any) -> int | None:
    """The length in the mean of the samples that are packed into rows; None where each row is one."""
    positions = positions_in_rows(batch)
    if positions is None or not (positions[:, 1:] == 0).any():
        return None
    return max(1, round(positions.numel() / int((positions == 0).sum())))


def _check_structure(batch: Any, structure: str, name: str) -> None:
    if _structure(batch) != structure:
        message = f"{name} is {_structure(batch)}, but the first batch is {structure}."
        raise InputError(message, "Give all batches the same structure.")


def _structure(batch: Any, lists: Set[int] = frozenset()) -> str:
    """A batch's containers, keys and tensors in words."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor of {batch.dim()} dimensions"
    lists = lists or (layout.lists if (layout := layout_of(batch)) else frozenset())
    if id(batch) in lists:
        return f"a list of {_structure(batch[0])}"
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return f"{{{', '.join(f'{key}: {_structure(batch[key], lists)}' for key in sorted(batch.keys(), key=str))}}}"
    if isinstance(batch, tuple) or (isinstance(batch, list) and tensors(batch)):
        return f"({', '.join(_structure(part, lists) for part in batch)})"
    return f"a {type(batch).__name__}"


def _elements_per_sample(batch: Any, cut: Cut | None) -> float:
    if cut is None and layout_of(batch):
        return sum(tensor.numel() for tensor in tensors(repeat_to(batch, 1)))
    return sum(tensor.numel() for tensor in tensors(batch)) / max(1, sample_count(batch, cut))


def batches_of(loader: Any, *, name: str = "loader") -> Iterator[Any]:
    """A fresh pass over a loader: an iterable that can be read again, or a function that returns an iterator. A bare
    iterator is refused, because its first batches would be lost to the search."""
    if callable(loader) and not isinstance(loader, Iterable):
        made = loader()
        require(
            hasattr(made, "__iter__"),
            f"the {name} must be a function that returns an iterator of batches",
            made,
        )
        return iter(made)
    if not isinstance(loader, Iterable):
        message = f"the {name} must be an iterable of batches, not a {type(loader).__name__}."
        raise InputError(message, "For example a DataLoader.")
    batches = iter(loader)  # once: it starts a DataLoader's workers and draws its seed
    if batches is loader:
        raise _read_once(f"the {name} is a {type(loader).__name__}")
    return batches


@contextlib.contextmanager
def put_back(loader: Any) -> Iterator[None]:
    """Undo what a look at a loader moves: the random numbers of the process and of the loader itself, and the position
    of a loader that has a state."""
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
    message = f"{what}, which can be read only once: one look would use it up."
    return InputError(
        message, "Pass a function that returns it, or a DataLoader, or a list of batches."
    )


def empty_pass() -> InputError:
    """The error for a pass that gives no batch although an earlier look did."""
    message = "a pass over the loader gave no batch: it is empty, or can be read only once."
    return InputError(
        message,
        "Pass a DataLoader, a list of batches, or a function that returns a fresh iterator.",
    )


def is_stateful(loader: Any) -> bool:
    """Whether a loader saves and loads its position, by torchdata's protocol."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def samples_in_pass(loader: Any) -> int | None:
    """The number of samples in the data set of a loader, where it is known without reading one."""
    return length_of(
        loader.samples if isinstance(loader, FileLoader) else getattr(loader, "dataset", None)
    )


def length_of(loader: Any) -> int | None:
    """The number of batches in a pass, where it is known without reading one."""
    try:
        return len(loader)
    # also of a DataLoader over an IterableDataset, which only looks as if it had a length
    except TypeError:
        return None
