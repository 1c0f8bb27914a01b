"""Tensors of a checkpoint that several ranks write, each its own parts; any number of ranks reads.

torch.distributed.checkpoint divides and joins them, in safetensors: its own format's reader and
planner would unpickle what they read, and so run code.
"""

import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, distribute_tensor

from autofit.core.errors import InputError, pluralize, shown
from autofit.setup import Setup
from autofit.training.host_tensors import Tensors
from autofit.training.optimizer_schema import Entry, StateError

_OPTIMIZER = "optimizer/"

Entries = dict[str, Entry]  # the optimizer's state, by the names of weights


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    """Refuses to unpickle what is no tensor."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse; torch would unpickle the content."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def write(tensors: Tensors, folder: Path) -> list[Path]:
    """Write the parts of this rank, and return the files; all ranks call it with the same names."""
    with _as_plain_errors():
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)

    number = dist.get_rank() + 1
    return list(folder.glob(f"shard-{number:05d}-*.safetensors"))


def described(folder: Path, files: Set[str]) -> Tensors:
    """The whole tensors by their names, on meta: their shapes and dtypes.

    Raises ValueError for others than these files: torch's reader reads all that it finds.
    """
    unknown = {file.name for file in folder.glob("*.safetensors")} - files
    if unknown:
        raise ValueError(f"nobody wrote {shown(min(unknown))}")

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {}
    for name, metadata in found.items():
        dtype = metadata.properties.dtype
        tensors[name] = torch.empty(metadata.size, dtype=dtype, device="meta")

    return tensors


def is_of_optimizer(name: str) -> bool:
    """Whether a tensor of that name belongs to the optimizer's state."""
    return name.startswith(_OPTIMIZER)


def weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint is, or whose optimizer state it is."""
    return _owner_and_key(name)[0] if is_of_optimizer(name) else name


def optimizer_state(setup: Setup) -> tuple[Tensors, Entries] | None:
    """The optimizer's state: tensors by their names in a file, and numbers.

    Tensors divide as their parameters do, or are whole on every rank. None for an optimizer of
    another kind, whose state belongs to the parts of one rank.
    """
    if not _divides(setup):
        return None

    tensors = {}
    numbers: Entries = {}
    for name, parameter in setup.trainable():
        for key, value in setup.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(name, {})[key] = value
                continue

            is_scalar = not value.dim()
            if isinstance(parameter, DTensor) and value.shape != parameter.shape and not is_scalar:
                return None

            tensors[_tensor_name(name, key)] = value

    return tensors, numbers


def check_divides(setup: Setup, state: dict[str, Any]) -> None:
    """Raise an InputError for optimizer state of other ranks that cannot be divided anew."""
    ranks = state.get("ranks", 1)
    if "optimizer" not in state or ranks == setup.ranks.layout.world:
        return
    if ranks == 1 and _divides(setup):
        return

    devices = "one device" if ranks == 1 else pluralize(ranks, "device")
    raise InputError(
        f"the state of optimizer {setup.config.optimizer} was written on {devices}, each for its "
        "own parts, and cannot be divided anew.",
        f"Resume on {devices}.",
    )


def entries_by_name(state: dict[str, Any]) -> Entries:
    """The optimizer's state of each weight, as one device wrote it.

    Raises StateError for what none wrote.
    """
    saved = state["optimizer"]
    names = state.get("names")
    entries = None
    if isinstance(saved, dict):
        entries = saved.get("state")
    if not isinstance(entries, dict) or names is None:
        raise StateError(f"it is {shown(saved)}")

    numbered = dict(enumerate(names))
    if not entries.keys() <= numbered.keys():
        raise StateError(f"it is of the weights {shown(list(entries))}")

    return {numbered[number]: entry for number, entry in entries.items()}


def entries_described(tensors: Tensors, numbers: Entries) -> Entries:
    """The optimizer's state of each weight, as several ranks wrote it."""
    entries = {name: dict(own) for name, own in numbers.items()}

    for path, tensor in tensors.items():
        if is_of_optimizer(path):
            name, key = _owner_and_key(path)
            entries.setdefault(name, {})[key] = tensor

    return entries


def restore(
    setup: Setup,
    saved: Tensors,
    state: dict[str, Any],
    folder: Path,
) -> None:
    """Fill this rank's weights and optimizer state from what several ranks wrote."""
    weights = dict(setup.trained_values())
    held = {}
    for name, tensor in saved.items():
        if name in weights:
            held[name] = weights[name]
        elif is_of_optimizer(name):
            owner, _ = _owner_and_key(name)
            held[name] = _empty_for(tensor, weights[owner], setup)

    with _as_plain_errors():
        dcp.load(
            held,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            planner=_TensorsOnly(),
            no_dist=not setup.ranks.are_several,
        )

    own = state.get("optimizer")  # of an optimizer whose state does not divide
    if own is not None:
        setup.optimizer.load_state_dict(own)
    else:
        numbers = state.get("optimizer_numbers") or {}
        _restore_optimizer(setup, entries_described(held, numbers))


def divide_optimizer(setup: Setup, state: dict[str, Any]) -> None:
    """Give this rank its part of an optimizer's state that one device wrote whole."""
    weights = dict(setup.trainable())
    entries = {}
    for name, whole in entries_by_name(state).items():
        if setup.part is not None and name not in weights:
            continue  # another stage's

        weight = weights[name].detach()
        own = dict(whole)

        for key, value in whole.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == weight.shape:
                own[key] = shard_of(value, weight)

        entries[name] = own

    _restore_optimizer(setup, entries)


def shard_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole."""
    if not isinstance(like, DTensor):
        return whole

    given = whole.to(like.device)
    return distribute_tensor(  # type: ignore[no-any-return]
        given,
        like.device_mesh,
        like.placements,
        src_data_rank=None,
    )


def names_of(setup: Setup) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    by_parameter = {parameter: name for name, parameter in setup.trainable()}
    names: list[str] = []

    for group in setup.optimizer.param_groups:
        names += [by_parameter.get(parameter, "") for parameter in group["params"]]
    return names


def _divides(setup: Setup) -> bool:
    """Whether the optimizer's state divides as the weights do."""
    return type(setup.optimizer).__module__.startswith("torch.optim")


def _tensor_name(weight: str, key: str) -> str:
    """The name of a tensor of the optimizer's state in files."""
    return f"{_OPTIMIZER}{weight}/{key}"


def _owner_and_key(name: str) -> tuple[str, str]:
    """The weight that a tensor of the optimizer's state belongs to, and what it is there."""
    weight, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
    return weight, key


def _empty_for(saved: torch.Tensor, weight: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Room for state of a weight: divided as that is where it has its shape."""
    if not saved.dim():
        return torch.empty((), dtype=saved.dtype, device="cpu")
    if saved.shape == weight.shape:
        return torch.empty_like(weight, dtype=saved.dtype)

    return torch.empty(saved.shape, dtype=saved.dtype, device=setup.device)


def _restore_optimizer(setup: Setup, entries: Entries) -> None:
    """Load this rank's state of each weight, with the settings of this run."""
    state = {}
    for number, name in enumerate(names_of(setup)):
        if entries.get(name):
            state[number] = entries[name]

    groups = setup.optimizer.state_dict()["param_groups"]
    setup.optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextmanager
def _as_plain_errors() -> Iterator[None]:
    """Raise what failed on a rank in place of PyTorch's own error, which is no Exception.

    Also keeps back PyTorch's warning that it runs without other ranks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failure, _ = min(error.failures.items())[1]
            raise failure from error
