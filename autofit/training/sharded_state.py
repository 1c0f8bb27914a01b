"""Tensors of a checkpoint that several ranks write, each its own parts, and that any number of ranks reads.

torch.distributed.checkpoint divides and joins them, in safetensors: its own format's reader and planner would unpickle
what they read, and so run code.
"""

import warnings
from collections.abc import Iterator, Mapping, Set
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
from autofit.training.optimizer_schema import StateError

_OPTIMIZER = "optimizer/"


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def write(tensors: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write the parts of this rank, and return the files; all ranks call it with the same names."""
    with _plainly():
        dcp.save(
            tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True)
        )
    return list(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))


def described(folder: Path, files: Set[str]) -> dict[str, torch.Tensor]:
    """The whole tensors by their names, on meta: their shapes and dtypes. Raises ValueError for others than these
    files, all of which torch's reader reads."""
    if strange := {file.name for file in folder.glob("*.safetensors")} - files:
        raise ValueError(f"nobody wrote {shown(min(strange))}")
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in found.items()
    }


def is_of_optimizer(name: str) -> bool:
    """Whether a tensor of that name belongs to the optimizer's state."""
    return name.startswith(_OPTIMIZER)


def optimizer_state(
    setup: Setup,
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]] | None:
    """The optimizer's state by names: tensors that divide as their parameters do or are whole everywhere, and numbers.
    None for an optimizer of another kind, whose state belongs to the parts of one rank."""
    if not _divides(setup):
        return None
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in setup.trainable():
        for key, value in setup.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                if (
                    isinstance(parameter, DTensor)
                    and value.dim()
                    and value.shape != parameter.shape
                ):
                    return None
                tensors[f"{_OPTIMIZER}{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def check_divides(setup: Setup, state: dict[str, Any]) -> None:
    """Raise an InputError for an optimizer of another kind whose state was written on other ranks: it cannot be divided
    anew."""
    ranks = state.get("ranks", 1)
    if (
        "optimizer" not in state
        or ranks == setup.ranks.layout.world
        or (ranks == 1 and _divides(setup))
    ):
        return
    on = pluralize(ranks, "device") if ranks > 1 else "one device"
    message = f"the state of optimizer {setup.config.optimizer} was written on {on}, each for its own parts"
    raise InputError(f"{message}, and cannot be divided anew.", f"Resume on {on}.")


def entries_by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each weight that one device wrote. Raises StateError for what none did."""
    saved = state["optimizer"]
    names = state.get("names")
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict) or names is None:
        raise StateError(f"it is {shown(saved)}")
    numbered = dict(enumerate(names))
    if not saved["state"].keys() <= numbered.keys():
        raise StateError(f"it is of the weights {shown(list(saved['state']))}")
    return {numbered[number]: entries for number, entries in saved["state"].items()}


def entries_described(
    parts: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The same of what several ranks wrote, the tensors on meta."""
    entries: dict[str, dict[str, Any]] = {name: dict(own) for name, own in numbers.items()}
    for tensor in filter(is_of_optimizer, parts):
        name, _, key = tensor.removeprefix(_OPTIMIZER).rpartition("/")
        entries.setdefault(name, {})[key] = parts[tensor]
    return entries


def restore(
    setup: Setup, saved: dict[str, torch.Tensor], state: dict[str, Any], folder: Path
) -> None:
    """Fill this rank's weights and optimizer state from what several ranks wrote."""
    weights = dict(setup.trained_values())
    held = {name: weights[name] for name in saved if name in weights}
    held |= {
        name: _like(each, _owner(name, weights), setup)
        for name, each in saved.items()
        if is_of_optimizer(name)
    }
    with _plainly():
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(
            held, storage_reader=reader, planner=_TensorsOnly(), no_dist=not setup.ranks.are_several
        )
    if "optimizer" in state:
        setup.optimizer.load_state_dict(state["optimizer"])
        return
    tensors = {name: each for name, each in held.items() if is_of_optimizer(name)}
    _restore_optimizer(setup, tensors, state.get("optimizer_numbers") or {})


def divide_optimizer(setup: Setup, state: dict[str, Any]) -> None:
    """Give this rank its part of an optimizer's state that one device wrote whole."""
    weights: dict[str, torch.Tensor] = {
        name: parameter.detach() for name, parameter in setup.trainable()
    }
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, entries in entries_by_name(state).items():
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(name, {})[key] = value
            else:
                is_divided = value.dim() and value.shape == weights[name].shape
                tensors[f"{_OPTIMIZER}{name}/{key}"] = (
                    own_part(value, weights[name]) if is_divided else value
                )
    _restore_optimizer(setup, tensors, numbers)


def own_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole."""
    if not isinstance(like, DTensor):
        return whole
    given = whole.to(like.device)
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[no-any-return]


def names_of(setup: Setup) -> list[str]:
    """The names of the optimizer's parameters, in its own order."""
    names = {parameter: name for name, parameter in setup.trainable()}
    return [
        names.get(each, "") for group in setup.optimizer.param_groups for each in group["params"]
    ]


def _divides(setup: Setup) -> bool:
    return type(setup.optimizer).__module__.startswith("torch.optim")


def _owner(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return weights[name.removeprefix(_OPTIMIZER).rpartition("/")[0]]


def _like(saved: torch.Tensor, weight: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Room for state of a weight: divided as that is where it has its shape."""
    if saved.dim() and saved.shape == weight.shape:
        return torch.empty_like(weight, dtype=saved.dtype)
    return torch.empty(
        saved.shape, dtype=saved.dtype, device=setup.device if saved.dim() else "cpu"
    )


def _restore_optimizer(
    setup: Setup, tensors: dict[str, torch.Tensor], numbers: dict[str, dict[str, Any]]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names_of(setup)):
        prefix = f"{_OPTIMIZER}{name}/"
        of_it = {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        if of_it := of_it | numbers.get(name, {}):
            state[number] = of_it
    setup.optimizer.load_state_dict(
        {"state": state, "param_groups": setup.optimizer.state_dict()["param_groups"]}
    )


@contextmanager
def _plainly() -> Iterator[None]:
    """Without a warning, and with what failed on a rank in place of PyTorch's own error, which is no Exception."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise min(error.failures.items())[1][0] from error
