"""Meta models: a model's structure without weights, and weights allocated where and how the run needs them.

Memory and speed do not depend on values. So a model is made with its parameters on the meta device, techniques change
it there, and only then does each parameter get memory, once, in its final dtype. A block that ranks divide is divided
before the next one is made, so that none of them ever holds the whole model.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.core.errors import InputError
from autofit.setup import Setup

DRAWN_DEVIATION = 0.02  # of weights with random values
_DRAWN = 250_007  # elements of a weight that are drawn, then repeated; prime, so that no two of its rows are the same
_FEW = 16  # elements of a frozen parameter that is a constant


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters of modules made inside on the meta device; buffers stay real, since their values matter. A
    parameter that is registered twice stays one parameter, so tied weights stay tied; constants keep their values."""
    original = nn.Module.register_parameter
    on_meta = WeakTensorKeyDictionary()  # real parameter -> its stand-in on meta

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            if parameter not in on_meta:
                on_meta[parameter] = nn.Parameter(
                    parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                )
                if (
                    not parameter.requires_grad
                    and parameter.numel() <= _FEW
                    and bool(parameter.isfinite().all())
                ):
                    # as D-FINE's scale, which it divides by
                    on_meta[parameter].constant = parameter.detach().clone()
            parameter = on_meta[parameter]
        original(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


def meta_model_from(factory: Callable[[], Any]) -> nn.Module:
    """Call a model factory with parameters on meta, or plainly where its code needs real ones."""
    try:
        with parameters_on_meta():
            model = factory()
    except (RuntimeError, TypeError):  # what torch raises when code reads values of a meta tensor
        model = factory()
    if not isinstance(model, nn.Module):
        code = getattr(factory, "__code__", None)
        where = f" (at {code.co_filename}:{code.co_firstlineno})" if code else ""
        message = f"the model factory{where} returned a {type(model).__name__}, not an nn.Module."
        raise InputError(message, "Return the model itself.")
    return model


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model without its weights, and with its buffers on the CPU; the model is not touched."""
    memo: dict[int, Any] = {id(buffer): buffer.detach().cpu().clone() for buffer in model.buffers()}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def materialize(setup: Setup, *, values: bool = True) -> None:
    """Move every parameter and buffer to the device in its final dtype; meta ones get random values, if `values`, and
    those of other ranks become the first one's. Then does what `setup.weights.on_materialized` asks for each module."""
    generator = (
        torch.Generator(device=setup.device).manual_seed(setup.hyperparameters.seed)
        if values
        else None
    )
    done: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    modules = list(setup.model.modules())
    position = {module: number for number, module in enumerate(modules)}
    actions: dict[int, list[Callable[[], Any]]] = defaultdict(list)
    for module, action in setup.weights.on_materialized:
        actions[max(position[part] for part in module.modules())].append(action)

    for number, module in enumerate(modules):
        _materialize_one(setup, module, done, generator)
        for action in actions[number]:
            action()


def _materialize_one(
    setup: Setup,
    module: nn.Module,
    done: WeakValueDictionary[nn.Parameter, nn.Parameter],
    generator: torch.Generator | None,
) -> None:
    """The parameters and buffers of one module; `done`: what others got of those that are shared."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue

        made = done.get(parameter)
        if made is None:
            made = _placed(parameter, name, setup, generator)
            holder = setup.weights.holders.get((module, name))
            made = done[parameter] = holder(made.data) if holder else made
        module._parameters[name] = made
        del made  # or the last weight's full values would stay beside the next one's

    # Running statistics follow the dtype of the weights beside them; other buffers keep theirs.
    weights = [parameter for parameter in module._parameters.values() if parameter is not None]
    dtypes = [weight.dtype for weight in weights if weight.is_floating_point()]
    for name, buffer in list(module._buffers.items()):
        if buffer is None:
            continue

        dtype = dtypes[0] if dtypes and buffer.is_floating_point() else buffer.dtype
        if buffer.is_meta:  # made of parameters, as what spectral_norm knows of them
            placed = torch.empty(buffer.shape, dtype=dtype, device=setup.device)
            if generator is not None:
                _fill(placed, "weight", generator)
        else:
            placed = setup.ranks.from_first(buffer.to(device=setup.device, dtype=dtype))
        module._buffers[name] = placed


def _placed(
    parameter: nn.Parameter, name: str, setup: Setup, generator: torch.Generator | None
) -> nn.Parameter:
    wanted = (
        setup.weights.trainable_dtype if parameter.requires_grad else setup.weights.frozen_dtype
    )
    dtype = wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype

    if parameter.device.type == "meta":
        # By its layout, not `empty_like`: PyTorch 2.11 has no fake tensors for a library's own class (Int8Params).
        tensor = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=dtype, device=setup.device
        )
        if generator is not None:
            _fill(tensor, name, generator)
            if hasattr(parameter, "constant"):
                tensor.copy_(parameter.constant)
            if setup.ranks.layout.replicate > 1:  # cards of another kind draw other values
                setup.ranks.from_first(tensor)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)

    # In place, so that whoever holds the user's parameter (the user, an optimizer) keeps holding it.
    parameter.data = setup.ranks.from_first(parameter.data.to(device=setup.device, dtype=dtype))
    return parameter


def _fill(tensor: torch.Tensor, name: str, generator: torch.Generator) -> None:
    """Values of the usual scale, which keep a loss finite."""
    if not tensor.is_floating_point():
        tensor.zero_()
    elif tensor.dim() >= 2:
        drawn, *others = tensor.view(-1).split(_DRAWN) if tensor.is_contiguous() else [tensor]
        drawn.normal_(0.0, DRAWN_DEVIATION, generator=generator)
        for part in others:  # on a CPU, drawing takes a hundred times as long as copying
            part.copy_(drawn[: len(part)])
    else:
        tensor.fill_(1.0 if name.endswith("weight") or tensor.dim() == 0 else 0.0)
