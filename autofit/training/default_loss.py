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
    loss = (
        output["loss"]
        if isinstance(output, dict) and "loss" in output
        else getattr(output, "loss", output)
    )
    if isinstance(loss, torch.Tensor) and (loss.numel() == 1 or loss is not output):
        return loss
    name = type(model).__name__
    remedy = _remedy(batch)
    losses = (
        {key: output[key] for key in output if "loss" in str(key)}
        if isinstance(output, Mapping)
        else output
    )
    if is_several(losses):
        raise multiple_losses_error(f"{name} returned {_described(losses)} losses")
    if loss is None and output is not None:
        raise InputError(
            f"{name} computed no loss of the batch.", f"Put labels in the batch, or p{remedy[1:]}"
        )
    first = output[0] if isinstance(output, tuple | list) and output else None
    # transformers without return_dict, and others
    if isinstance(first, torch.Tensor) and first.numel() == 1:
        remedy = f"Pass loss=lambda model, batch: model({'**' if kwargs else '*'}batch)[0], if that is one."
    raise InputError(
        f"{name} returned {_described(output)}, which is no loss, and none is given.", remedy
    )


def _check_columns(model: nn.Module, columns: Mapping[str, Any], error: Exception) -> None:
    """Raise an InputError where an error of the model's code comes from a column that it does not take, or, in a model
    of transformers, from one that holds lists."""
    text = message_of(error)
    found = _NOT_TAKEN.search(text)
    name = found[1] if found else None
    signature = _signature(model)
    if name in columns and (signature is None or name not in signature.parameters):
        raise _untaken(model, [str(name)]) from error

    lists = [name for name, value in columns.items() if isinstance(value, list | tuple)]
    is_of_transformers = hasattr(getattr(model, "config", None), "model_type")
    if not lists or not is_of_transformers or not _LISTS.search(text):
        return
    first = columns[lists[0]]
    holds = "texts" if first and isinstance(first[0], str) else "lists"
    if first and isinstance(first[0], torch.Tensor):
        holds = f"a list of {pluralize(len(first), 'tensor')}, as DataLoader's own collate_fn makes it of lists"
    message = f"{type(model).__name__} does not take the batches: {' and '.join(lists)} should be tensors, not {holds}."
    remedy = 'Give tensors: dataset.set_format("torch"), or a collate_fn that pads and stacks them.'
    raise InputError(message, remedy) from error


def _untaken(model: nn.Module, columns: list[str]) -> InputError:
    """The error for columns of a batch that a model's forward does not take."""
    names = " and ".join(columns)
    message = f"{type(model).__name__}.forward does not take {names} of the batches, and no loss is given."
    listed = ", ".join(f'"{name}"' for name in columns)
    remedy = f"Leave {names} out (dataset.remove_columns([{listed}]), or in collate_fn), or pass a loss of your own."
    return InputError(message, remedy)


def _signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of a model's forward; None where its code has none, as compiled code."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def is_several(losses: Any) -> bool:
    """Whether they are losses of several optimizers, or of several parts of one."""
    values = list(losses.values()) if isinstance(losses, Mapping) else losses
    trained = torch.is_grad_enabled()  # a metric beside a loss is not
    numbers = isinstance(values, tuple | list) and all(
        isinstance(each, torch.Tensor) for each in values
    )
    return (
        numbers
        and len(values) > 1
        and all(v.numel() == 1 and (v.requires_grad or not trained) for v in values)
    )


def check_call(model: nn.Module, batch: Any) -> None:
    """Check by its signature that a model takes the batch, as it must where no loss is given."""
    if model._forward_pre_hooks:  # they may change what the forward gets
        return
    signature = _signature(model)
    args, kwargs = _arguments(batch)
    if signature and not _binds(signature, *args, **kwargs):
        untaken = [name for name in kwargs if name not in signature.parameters]
        taken = {name: value for name, value in kwargs.items() if name not in untaken}
        if untaken and taken and _binds(signature, **taken):
            raise _untaken(model, untaken)
        forward = f"{type(model).__name__}.forward({', '.join(signature.parameters)})"
        message = (
            f"a batch is {_described(batch)}, which {forward} does not take, and no loss is given."
        )
        raise InputError(message, _remedy(batch))


def _binds(signature: inspect.Signature, /, *args: Any, **columns: Any) -> bool:
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
        raise InputError(
            f"the loss must be a function of (model, batch), not {shown(loss)}.", _remedy(())
        )
    message = f"{name} is a function of outputs and targets; a loss is one of (model, batch)."
    raise InputError(message, f"Pass loss=lambda model, batch: {name}(model(batch[0]), batch[1]).")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), {**batch}
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _remedy(batch: Any) -> str:
    """How to pass a loss, in the names that the batch has."""
    _, kwargs = _arguments(batch)
    if isinstance(batch, torch.Tensor):
        example = "F.mse_loss(model(batch), batch)"
    else:
        inputs, targets = (
            (f'"{next(iter(kwargs))}"', f'"{list(kwargs)[-1]}"') if kwargs else ("0", "1")
        )
        example = f"F.cross_entropy(model(batch[{inputs}]), batch[{targets}])"
    return f"Pass loss=..., for example loss=lambda model, batch: {example}."


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return f"a {type(value).__name__} of {', '.join(map(str, value.keys()))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
