"""The default loss: the model's own. Where it has none, an error says how to pass one."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, several, shown


def default_loss(model: nn.Module, batch: Any) -> Any:
    """`model(**batch).loss`, or the model's output when that is the loss."""
    args, kwargs = _arguments(batch)
    output = model(*args, **kwargs)
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and (loss.numel() == 1 or loss is not output):
        return loss
    name, remedy = type(model).__name__, _remedy(batch)
    losses = {key: output[key] for key in output if "loss" in str(key)} if isinstance(output, Mapping) else output
    if is_several(losses):
        raise several(f"{name} returned {_described(losses)} losses")
    if loss is None and output is not None:
        raise InputError(f"{name} computed no loss of the batch.", f"Put labels in the batch, or p{remedy[1:]}")
    first = output[0] if isinstance(output, tuple | list) and output else None
    if isinstance(first, torch.Tensor) and first.numel() == 1:  # transformers without return_dict, and others
        remedy = f"Pass loss=lambda model, batch: model({'**' if kwargs else '*'}batch)[0], if that is one."
    raise InputError(f"{name} returned {_described(output)}, which is no loss, and none is given.", remedy)


def is_several(losses: Any) -> bool:
    """Whether they are losses of several optimizers, or of several parts of one."""
    values = list(losses.values()) if isinstance(losses, Mapping) else losses
    trained = torch.is_grad_enabled()  # a metric beside a loss is not
    numbers = isinstance(values, tuple | list) and all(isinstance(each, torch.Tensor) for each in values)
    return numbers and len(values) > 1 and all(v.numel() == 1 and (v.requires_grad or not trained) for v in values)


def check_call(model: nn.Module, batch: Any) -> None:
    """Check by its signature that a model takes the batch, as it must where no loss is given."""
    if model._forward_pre_hooks:  # they may change what the forward gets
        return
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled code has none
        return
    args, kwargs = _arguments(batch)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        forward = f"{type(model).__name__}.forward({', '.join(signature.parameters)})"
        message = f"a batch is {_described(batch)}, which {forward} does not take, and no loss is given."
        raise InputError(message, _remedy(batch)) from None


def check_loss_function(loss: Any) -> None:
    """Check that a given loss can be a function of (model, batch)."""
    if isinstance(loss, nn.modules.loss._Loss):
        name = f"nn.{type(loss).__name__}()"
    elif getattr(loss, "__module__", None) == "torch.nn.functional":
        name = f"F.{loss.__name__}"
    elif loss is None or callable(loss):
        return
    else:
        raise InputError(f"the loss must be a function of (model, batch), not {shown(loss)}.", _remedy(()))
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
        inputs, targets = (f'"{next(iter(kwargs))}"', f'"{list(kwargs)[-1]}"') if kwargs else ("0", "1")
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
