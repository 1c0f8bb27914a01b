"""Meta models: a model's structure without weights, which are allocated where the run needs them.

Memory and speed do not depend on values. So a model is made with its parameters on the meta device,
techniques change it there, and only then does each parameter get memory, once, in its final dtype.
A block that ranks divide is divided before the next one is made, so that none of them ever holds
the whole model.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.core.errors import InputError
from autofit.setup import Setup

DRAWN_DEVIATION = 0.02  # of weights with random values
# elements of a weight that are drawn, then repeated; prime, so that no two of its rows are the same
_DRAWN = 250_007
_FEW = 16  # elements of a frozen parameter that is a constant
# In place of values that nothing holds: on meta these run as Python code of PyTorch, which took
# three quarters of the time in which a deep model is made.
_DRAWS = ("normal_", "uniform_")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters of modules made inside on the meta device.

    Buffers stay real, since their values matter. A parameter that is registered twice stays one
    parameter, so tied weights stay tied; constants keep their values.
    """
    original = nn.Module.register_parameter
    on_meta = WeakTensorKeyDictionary()  # real parameter -> its stand-in on meta

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            if parameter not in on_meta:
                on_meta[parameter] = _stand_in(parameter)

            parameter = on_meta[parameter]

        original(module, name, parameter)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(nn.Module, "register_parameter", register))
        for name in _DRAWS:
            draw = _unless_on_meta(getattr(torch.Tensor, name))
            patches.enter_context(mock.patch.object(torch.Tensor, name, draw))

        yield


def _unless_on_meta(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A method of tensors that draws values, which does nothing on the meta device."""

    @functools.wraps(draw)
    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        return draw(tensor, *args, **kwargs)

    return drawn


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter on meta for a real one; it keeps the values of a constant."""
    values = parameter.detach()
    meta = nn.Parameter(values.to("meta"), requires_grad=parameter.requires_grad)
    is_small = not parameter.requires_grad and parameter.numel() <= _FEW
    if is_small and bool(values.isfinite().all()):
        # as D-FINE's scale, which it divides by
        meta.constant = values.clone()  # type: ignore[attr-defined]

    return meta


def meta_model_from(factory: Callable[[], Any]) -> nn.Module:
    """Call a model factory with parameters on meta, or plainly where its code needs real ones."""
    try:
        with parameters_on_meta():
            model = factory()
    except (RuntimeError, TypeError):  # what torch raises when code reads values of a meta tensor
        model = factory()

    if not isinstance(model, nn.Module):
        code = getattr(factory, "__code__", None)
        where = ""
        if code:
            where = f" (at {code.co_filename}:{code.co_firstlineno})"

        message = f"the model factory{where} returned a {type(model).__name__}, not an nn.Module."
        raise InputError(message, "Return the model itself.")

    return model


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model without its weights, and with its buffers on the CPU."""
    memo: dict[int, Any] = {}
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().cpu().clone()

    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)

    return copy.deepcopy(model, memo)


def materialize(setup: Setup, *, values: bool = True) -> None:
    """Move every parameter and buffer to the device in its final dtype.

    Meta ones get random values, if `values`, and those of other ranks become the first one's. Once
    a module is whole, what `setup.weights.on_materialized` asks for it is done.
    """
    done: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
    elsewhere = _weights_elsewhere(setup)
    held = {weight: weight for weight in setup.model.parameters()} if elsewhere else {}

    modules = [module for model in setup.all_models() for module in model.modules()]
    position = {module: number for number, module in enumerate(modules)}
    actions: dict[int, list[Callable[[], Any]]] = defaultdict(list)
    for module, action in setup.weights.on_materialized:
        last = max(position[part] for part in module.modules())
        actions[last].append(action)

    generator = None
    models = setup.all_models()
    for number, module in enumerate(modules):
        if values and module in models:  # so that a copy of the model gets its values
            generator = torch.Generator(setup.device).manual_seed(setup.hyperparameters.seed)

        for name, parameter in elsewhere.pop(module, ()):
            if parameter in held and parameter not in done:  # tied to one that this stage has
                held[parameter] = done[parameter] = _placed(
                    parameter,
                    name,
                    setup,
                    generator,
                )
            elif parameter not in done and parameter not in held:
                _skip_draws(setup, parameter, name, generator)
                held[parameter] = parameter

        _materialize_one(setup, module, done, generator)
        for action in actions[number]:
            action()


def _weights_elsewhere(setup: Setup) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """The weights that other stages of a pipeline hold, by the module at which they are drawn."""
    part = setup.part
    if part is None:
        return {}

    found: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    for absent in part.absent:
        found.setdefault(absent.module, []).append((absent.name, absent.weight))

    for number, block in enumerate(part.whole):
        if not part.holds(number):
            found[part.blocks[number]] = list(block.named_parameters())

    return found


def _skip_draws(
    setup: Setup,
    parameter: nn.Parameter,
    name: str,
    generator: torch.Generator | None,
) -> None:
    """Draw what another stage draws for a weight, so that what follows gets the same values."""
    if generator is None or not parameter.is_meta:
        return

    shape = parameter.shape
    if len(shape) >= 2 and parameter.is_contiguous():
        shape = torch.Size([1, min(parameter.numel(), _DRAWN)])

    dtype = setup.weights.dtype_of(parameter)
    _fill(
        torch.empty(shape, dtype=dtype, device=setup.device),
        name,
        generator,
    )


def _materialize_one(
    setup: Setup,
    module: nn.Module,
    done: WeakValueDictionary[nn.Parameter, nn.Parameter],
    generator: torch.Generator | None,
) -> None:
    """The parameters and buffers of one module; `done` holds what others got of shared ones."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue

        made = done.get(parameter)
        if made is None:
            made = _placed(parameter, name, setup, generator)
            holder = setup.weights.holders.get((module, name))
            if holder:
                made = holder(made.data)

            done[parameter] = made

        module._parameters[name] = made
        del made  # or the last weight's full values would stay beside the next one's

    # Running statistics follow the dtype of the weights beside them; other buffers keep theirs.
    weights_dtype = None
    for weight in module._parameters.values():
        if weight is not None and weight.is_floating_point():
            weights_dtype = weight.dtype
            break

    for name, buffer in list(module._buffers.items()):
        if buffer is None:
            continue

        dtype = buffer.dtype
        if weights_dtype is not None and buffer.is_floating_point():
            dtype = weights_dtype

        if buffer.is_meta:  # made of parameters, as what spectral_norm knows of them
            placed = torch.empty(buffer.shape, dtype=dtype, device=setup.device)
            if generator is not None:
                _fill(placed, "weight", generator)
        else:
            placed = setup.ranks.from_first(buffer.to(device=setup.device, dtype=dtype))

        module._buffers[name] = placed


def _placed(
    parameter: nn.Parameter,
    name: str,
    setup: Setup,
    generator: torch.Generator | None,
) -> nn.Parameter:
    """A parameter on the device, in the dtype of trained or of frozen weights."""
    dtype = setup.weights.dtype_of(parameter)
    if parameter.device.type == "meta":
        # By its layout, not `empty_like`: PyTorch 2.11 has no fake tensors for a library's own
        # class (Int8Params).
        tensor = torch.empty_strided(
            parameter.size(),
            parameter.stride(),
            dtype=dtype,
            device=setup.device,
        )

        if generator is not None:
            _fill(tensor, name, generator)
            if hasattr(parameter, "constant"):
                tensor.copy_(parameter.constant)
            if setup.ranks.layout.replicate > 1:  # cards of another kind draw other values
                setup.ranks.from_first(tensor)

        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)

    # In place, so that the user and an optimizer, who hold this parameter, keep holding it.
    values = parameter.data.to(device=setup.device, dtype=dtype)
    parameter.data = setup.ranks.from_first(values)

    return parameter


def _fill(tensor: torch.Tensor, name: str, generator: torch.Generator) -> None:
    """Values of the usual scale, which keep a loss finite."""
    if not tensor.is_floating_point():
        tensor.zero_()
    elif tensor.dim() >= 2:
        parts = [tensor]
        if tensor.is_contiguous():
            parts = list(tensor.view(-1).split(_DRAWN))

        drawn = parts[0].normal_(0.0, DRAWN_DEVIATION, generator=generator)
        for part in parts[1:]:  # on a CPU, drawing takes a hundred times as long as copying
            part.copy_(drawn[: len(part)])
    elif name.endswith("weight") or tensor.dim() == 0:
        tensor.fill_(1.0)
    else:
        tensor.fill_(0.0)
