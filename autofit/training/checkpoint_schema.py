"""What a checkpoint may hold.

All that is read of one is checked here, against one schema and the model, before any of it is used:
right checksums say only that a file is what somebody wrote.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autofit.core.errors import printable, sentence, shown
from autofit.setup import Setup
from autofit.training import random_state, sharded_state
from autofit.training.host_tensors import Tensors
from autofit.training.optimizer_schema import OptimizerSchema, StateError
from autofit.training.sharded_state import Entries

_MOST_SAMPLES = 2**24  # that a step can take
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Positive = Annotated[int, Field(ge=1, lt=2**63)]
_Plain = str | int | float | bool | None


class DamagedError(Exception):
    """A checkpoint that does not hold what a training writes."""


class _Schema(BaseModel):
    """What part of a checkpoint holds; a later autofit may add fields."""

    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=True)


class _Label(_Schema):
    """Of checkpoint.yaml: which run this is, and the checksums of all files."""

    autofit_checkpoint: int
    next_step: _Count
    config: dict[str, _Plain]
    hyperparameters: dict[str, _Plain]
    crc32: dict[str, int]
    effective_batch_size: _Positive | None = None
    frozen_weights: str | None = None
    ranks: _Positive = 1


class _State(_Schema):
    """Of state.json; the names and numbers are those of the optimizer's weights."""

    random: dict[str, Any]
    ranks: _Positive = 1
    names: list[str] | None = None
    optimizer_numbers: dict[str, dict[str, Any]] | None = None
    scaler: dict[str, Any] | None = None
    skipped_updates: _Count = 0
    data: dict[str, Any] | None


class _Position(_Schema):
    """The position in the data, as `Epochs` has it."""

    passes: _Count
    given: _Count
    samples: _Count
    batch_size: _Positive | None
    pass_samples: _Count | None
    last: int | None
    loader: Any = None


STATE_FIELDS = _State.model_fields.keys()


def check_label(label: Any) -> None:
    """Raise a DamagedError for other than a label."""
    _validate(_Label, label, "checkpoint.yaml")

    for name in label["crc32"]:
        if Path(name).name != name:
            raise DamagedError(f"checkpoint.yaml names the file {shown(name)}")


def check_state(setup: Setup, contents: Mapping[str, Any], label: Mapping[str, Any]) -> None:
    """Raise a DamagedError for other than the state of a run."""
    _validate(_State, contents, "state.json")
    ranks = contents.get("ranks", 1)
    labelled = label.get("ranks", 1)
    if ranks != labelled:
        raise DamagedError(f"state.json is of ranks {ranks}, and not {labelled}")

    _check_position(contents["data"], label["next_step"])
    try:
        random_state.check(contents["random"], setup.device)
    except ValueError as error:
        raise DamagedError(str(error)) from error

    if setup.scaler and contents.get("scaler"):
        _check_scaler(contents["scaler"], setup.scaler.state_dict())


def _check_position(data: dict[str, Any] | None, next_step: int) -> None:
    """Raise a DamagedError for a position in the data that a run cannot have reached."""
    if data is None or "samples" not in data:  # an earlier autofit counted steps alone
        return

    _validate(_Position, data, "the position in the data")
    steps = next_step + 1  # the last one may have begun
    most_samples = steps * _MOST_SAMPLES
    if data["passes"] > steps or not data["given"] <= data["samples"] <= most_samples:
        raise DamagedError(f"the position in the data is none that {next_step} steps lead to")


def _check_scaler(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a DamagedError for other than the numbers that a loss scaler has."""
    for key in own:
        number = saved.get(key)
        if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise DamagedError(f"{key} of the loss scaler is {shown(number)}")


def check_tensors(setup: Setup, weights: Tensors, buffers: Tensors) -> None:
    """Check what kind of numbers weights hold, and that buffers fit the model.

    Whether weights are of this model is told by their names and shapes. Raises DamagedError.
    """
    for name, weight in setup.trainable():
        if name in weights and not _is_alike(weights[name], weight):
            dtype = weights[name].dtype
            raise DamagedError(f"weight {name} is of {dtype}, and not of {weight.dtype}")

    modules = dict(setup.model.named_modules())
    for name, values in buffers.items():
        parent, _, own_name = name.rpartition(".")
        module = modules.get(parent)
        if module is None or (own_name not in module._buffers and hasattr(module, own_name)):
            raise DamagedError(f"the model has no buffer {printable(name)}")

        own = module._buffers.get(own_name)
        if own is None:  # one that the model makes while it runs
            continue

        may_grow = not type(module).__module__.startswith("torch.nn.")
        has_shape = may_grow or values.shape == own.shape
        if not has_shape or not _is_alike(values, own):
            found = f"{list(values.shape)} of {values.dtype}"
            needed = f"{list(own.shape)} of {own.dtype}"
            raise DamagedError(f"buffer {name} is {found}, and not {needed}")


def _is_alike(saved: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether both hold numbers of one kind, as of whatever width."""
    return _kind(saved.dtype) == _kind(own.dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, ...]:
    """What tells floats, complex numbers, booleans and integers apart."""
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def check_optimizer(
    setup: Setup,
    contents: dict[str, Any],
    parts: Tensors | None,
    schema: OptimizerSchema,
) -> None:
    """Check the optimizer's state, and put it as it is to be loaded.

    `parts`: what several ranks wrote, on meta. Raises DamagedError.
    """
    has_state = "optimizer" in contents  # of one device, or of this rank's parts
    is_divided_anew = contents.get("ranks", 1) == 1 and setup.ranks.are_several
    try:
        if has_state and not is_divided_anew:
            if contents.get("names") not in (None, sharded_state.names_of(setup)):
                raise StateError("its weights have another order")

            contents["optimizer"] = schema.fitted(contents["optimizer"])
        elif has_state:
            _check_entries(
                setup,
                sharded_state.entries_by_name(contents),
                schema,
                on_meta=False,
            )
        elif parts is not None:
            numbers = contents.get("optimizer_numbers") or {}
            entries = sharded_state.entries_described(parts, numbers)
            _check_entries(setup, entries, schema, on_meta=True)
        else:
            raise StateError("there is none")
    except StateError as error:
        raise DamagedError(f"the optimizer's state is not of this model: {error}") from error


def _check_entries(
    setup: Setup,
    entries: Entries,
    schema: OptimizerSchema,
    *,
    on_meta: bool,
) -> None:
    """Raise a StateError unless every entry is that of a trained weight."""
    weights = dict(setup.trainable())
    for name, entry in entries.items():
        if setup.part is not None and name not in weights and name in setup.part.names:
            continue  # another stage's
        if name not in weights:
            raise StateError(f"there is no weight {printable(name)}")

        schema.check_entry(
            weights[name],
            entry,
            name,
            on_meta=on_meta,
        )


def _validate(schema: type[_Schema], data: Any, what: str) -> None:
    """Raise a DamagedError that names the first value of another kind."""
    try:
        schema.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"

        given = shown(first["input"])
        if first["type"] == "missing":
            given = "absent"

        raise DamagedError(
            f"{what} is not as a training writes it: {printable(where)} is {given}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DamagedError(f"{what} is not as a training writes it: {sentence(error)}") from error
