"""The default loss: the model's own. Where it has none, an error says how to pass one."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, message_of, multiple_losses_error, pluralize, shown

_NOT_TAKEN = re.compile(
    r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'"
)
_LISTS = re.compile(r"\b(list|tuple|str)\b")  # in errors of code that was given one


def default_loss(model: nn.Module, batch: Any) -> Any:
    """`model(**batch).loss`, or the model's output when that is the loss."""
    args, kwargs = _arguments(batch)
    try:
        output = model(*args, **kwargs)
    except (TypeError, AttributeError, ValueError) as error:
        _check_columns(model, kwargs, error)
        raise

    loss = getattr(output, "loss", output)
    if isinstance(output, dict) and "loss" in output:
        loss = output["loss"]
    if isinstance(loss, torch.Tensor) and (loss.numel() == 1 or loss is not output):
        return loss

    name = type(model).__name__
    losses = output
    if isinstance(output, Mapping):
        losses = {key: output[key] for key in output if "loss" in str(key)}
    if is_several(losses):
        raise multiple_losses_error(f"{name} returned {_described(losses)} losses")

    remedy = _remedy(batch)
    if loss is None and output is not None:
        raise InputError(
            f"{name} computed no loss of the batch.",
            f"Put labels in the batch, or p{remedy[1:]}",
        )

    if isinstance(output, tuple | list) and output:
        first = output[0]
        # transformers without return_dict, and others
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            stars = "**" if kwargs else "*"
            remedy = f"Pass loss=lambda model, batch: model({stars}batch)[0], if that is one."

    returned = _described(output)
    message = f"{name} returned {returned}, which is no loss, and none is given."
    raise InputError(message, remedy)


def _check_columns(model: nn.Module, columns: Mapping[str, Any], error: Exception) -> None:
    """Raise an InputError where an error of the model's code comes from a column of the batch.

    It may be a column that the model does not take or, in a model of transformers, one that holds
    lists.
    """
    text = message_of(error)
    found = _NOT_TAKEN.search(text)
    if found and found[1] in columns:
        signature = _signature(model)
        if signature is None or found[1] not in signature.parameters:
            raise _untaken(model, [found[1]]) from error

    lists = [name for name, value in columns.items() if isinstance(value, list | tuple)]
    is_of_transformers = hasattr(getattr(model, "config", None), "model_type")
    if not lists or not is_of_transformers or not _LISTS.search(text):
        return

    first = columns[lists[0]]
    holds = "lists"
    if first and isinstance(first[0], str):
        holds = "texts"
    elif first and isinstance(first[0], torch.Tensor):
        count = pluralize(len(first), "tensor")
        holds = f"a list of {count}, as DataLoader's own collate_fn makes it of lists"

    name = type(model).__name__
    names = " and ".join(lists)
    message = f"{name} does not take the batches: {names} should be tensors, not {holds}."
    remedy = 'Give tensors: dataset.set_format("torch"), or a collate_fn that pads and stacks them.'
    raise InputError(message, remedy) from error


def _untaken(model: nn.Module, columns: list[str]) -> InputError:
    """The error for columns of a batch that a model's forward does not take."""
    forward = f"{type(model).__name__}.forward"
    names = " and ".join(columns)
    listed = ", ".join(f'"{name}"' for name in columns)

    return InputError(
        f"{forward} does not take {names} of the batches, and no loss is given.",
        f"Leave {names} out (dataset.remove_columns([{listed}]), or in collate_fn), or pass a loss"
        " of your own.",
    )


def _signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of a model's forward; None where its code has none, as compiled code."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def is_several(losses: Any) -> bool:
    """Whether they are losses of several optimizers, or of several parts of one loss.

    Given as a mapping or a list; while gradients are computed, each must need one.
    """
    values = losses
    if isinstance(losses, Mapping):
        values = list(losses.values())
    if not isinstance(values, tuple | list) or len(values) < 2:
        return False

    for value in values:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return False
        if torch.is_grad_enabled() and not value.requires_grad:  # a metric beside a loss
            return False

    return True


def check_call(model: nn.Module, batch: Any) -> None:
    """Check by its signature that a model takes the batch, as it must where no loss is given."""
    if model._forward_pre_hooks:  # they may change what the forward gets
        return

    signature = _signature(model)
    args, kwargs = _arguments(batch)
    if signature is None or _binds(signature, *args, **kwargs):
        return

    untaken = [name for name in kwargs if name not in signature.parameters]
    taken = {name: value for name, value in kwargs.items() if name not in untaken}
    if untaken and taken and _binds(signature, **taken):
        raise _untaken(model, untaken)

    given = _described(batch)
    names = ", ".join(signature.parameters)
    forward = f"{type(model).__name__}.forward({names})"
    message = f"a batch is {given}, which {forward} does not take, and no loss is given."
    raise InputError(message, _remedy(batch))


def _binds(signature: inspect.Signature, /, *args: Any, **columns: Any) -> bool:
    """Whether a function of this signature takes the arguments."""
    try:
        signature.bind(*args, **columns)
    except TypeError:
        return False

    return True


def check_loss_function(loss: Any) -> None:
    """Check that a given loss can be a function of (model, batch)."""
    if isinstance(loss, nn.modules.loss._Loss):
        name = f"nn.{type(loss).__name__}()"
    elif getattr(loss, "__module__", None) == "torch.nn.functional":
        name = f"F.{loss.__name__}"
    elif loss is None or callable(loss):
        return
    else:
        message = f"the loss must be a function of (model, batch), not {shown(loss)}."
        raise InputError(message, _remedy(()))

    raise InputError(
        f"{name} is a function of outputs and targets; a loss is one of (model, batch).",
        f"Pass loss=lambda model, batch: {name}(model(batch[0]), batch[1]).",
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that a model gets of a batch."""
    if hasattr(batch, "keys"):
        return (), {**batch}
    if isinstance(batch, tuple | list):
        return tuple(batch), {}

    return (batch,), {}


def _remedy(batch: Any) -> str:
    """How to pass a loss, in the names that the batch has."""
    inputs = "0"
    targets = "1"
    _, columns = _arguments(batch)
    if columns:
        names = list(columns)
        inputs = f'"{names[0]}"'
        targets = f'"{names[-1]}"'

    example = f"F.cross_entropy(model(batch[{inputs}]), batch[{targets}])"
    if isinstance(batch, torch.Tensor):
        example = "F.mse_loss(model(batch), batch)"

    return f"Pass loss=..., for example loss=lambda model, batch: {example}."


def _described(value: Any) -> str:
    """What a batch or an output is, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"

    kind = f"a {type(value).__name__}"
    if hasattr(value, "keys"):
        names = ", ".join(map(str, value.keys()))
        return f"{kind} of {names}"

    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}"

    return kind
