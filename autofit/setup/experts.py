"""Experts of a mixture, whose weights transformers holds in no layers, but as parameters of three dimensions, a matrix
for each expert; and their quantised form, to which peft's adapters are added."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from autofit.setup.adapters import plain_name


class ExpertWeight(NamedTuple):
    """One parameter [experts, ., .], and the module that holds it."""

    module_name: str
    module: nn.Module
    name: str
    parameter: torch.Tensor

    @property
    def full_name(self) -> str:
        """As in the state dict of the model without adapters."""
        return f"{self.module_name}.{self.name}"


def expert_weights(model: nn.Module) -> Iterator[ExpertWeight]:
    """The weights of all experts, by the name of the class that holds them: many other parameters have three
    dimensions. Of quantised ones, as they are stored. Names are as they were without adapters."""
    for name, module in model.named_modules():
        module_name = plain_name(name)
        if "expert" not in f"{type(module).__name__} {module_name.rpartition('.')[2]}".lower():
            continue
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3:
                yield ExpertWeight(module_name, module, own, parameter)
        for own, stored in quantised_weights(module):
            yield ExpertWeight(module_name, module, own, stored.original)


def quantised_weights(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names of a module's own quantised parameters, each with its parametrization."""
    for name, parametrizations in getattr(module, "parametrizations", {}).items():
        if isinstance(parametrizations[0], Dequantised):
            yield name, parametrizations


class Dequantised(nn.Module):
    """A parametrization: the values of a quantised parameter, made anew for each forward that reads it. bitsandbytes'
    own needs the values before; this one stores them when they are made."""

    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value
        self.state: Any = None  # what restores the values

    @classmethod
    def of(cls, weight: ExpertWeight, value: str) -> Any:
        """Parametrize a weight that is still to be stored; returns what holds it, as `original`."""
        from bitsandbytes.nn.parametrize import (
            _disable_parametrization_cache,
            _enable_parametrization_cache,
        )

        module = weight.module
        # some experts read a weight once for each of them
        if not parametrize.is_parametrized(module):
            module.register_forward_pre_hook(_enable_parametrization_cache)
            module.register_forward_hook(_disable_parametrization_cache, always_call=True)
        parametrize.register_parametrization(module, weight.name, cls(value), unsafe=True)
        return module.parametrizations[weight.name]  # type: ignore[index]

    def store(self, values: torch.Tensor) -> nn.Parameter:
        """The quantised parameter, of values in the dtype that they will be restored in."""
        from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

        if self.value == "int8":
            rows, scales, _ = int8_vectorwise_quant(values.flatten(0, -2).to(torch.float16))
            stored = rows.view_as(values)
            self.state = scales.div_(127).view(*values.shape[:-1], 1), values.dtype
            constants = [self.state[0]]
        else:
            double = self.value == "nf4-dq"
            stored, self.state = quantize_4bit(values, compress_statistics=double, quant_type="nf4")
            constants = [self.state.absmax, self.state.code]
            if double:
                constants += [self.state.offset, self.state.state2.absmax, self.state.state2.code]
        parameter: Any = nn.Parameter(stored, requires_grad=False)
        parameter.constants = constants
        return parameter  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        if self.state is None:
            return stored
        if self.value != "int8":
            return dequantize_4bit(stored, self.state)  # type: ignore[no-any-return]
        scales, dtype = self.state
        return torch.mul(stored, scales, out=torch.empty_like(stored, dtype=dtype))


def adapts_parameter(module: nn.Module) -> bool:
    """Whether a module is peft's adapter of a parameter, around the module that holds it."""
    return hasattr(module, "lora_A") and hasattr(module, "parameter_name")


def add_adapters(wrapper: Any) -> None:
    """Make peft's adapter of a parameter work where that is quantised. peft 0.21 leaves its parametrization behind
    beside another one, and with two parameters of a module reads the second one's values before adding its adapter."""
    if any(
        name == wrapper.parameter_name for name, _ in quantised_weights(wrapper.get_base_layer())
    ):
        wrapper._activate_lora = functools.partial(_activated, wrapper)


def nest_in_order(model: nn.Module) -> None:
    """Nest peft's adapters of quantised experts in the order of their parameters, the first one innermost, as peft
    does beside plain ones. The names of saved adapters follow the nesting, so plain peft reads them on the unquantised
    model. By itself peft 0.21 nests adapters of parametrized experts in the alphabet's order."""
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    for parent, name, child in children:
        if adapts_parameter(parent) or not adapts_parameter(child):
            continue

        wrappers: list[Any] = []
        experts: Any = child
        while adapts_parameter(experts):
            wrappers.append(experts)
            experts = experts.base_layer

        order = [own for own, _ in quantised_weights(experts)]
        if not order:
            continue

        nested = experts
        for wrapper in sorted(wrappers, key=lambda each: order.index(each.parameter_name)):
            wrapper.base_layer = nested
            nested = wrapper
        setattr(parent, name, nested)


@contextmanager
def _activated(wrapper: Any, adapters: list[str]) -> Iterator[None]:
    parametrizations = wrapper.get_base_layer().parametrizations[wrapper.parameter_name]
    parametrizations.append(_Adapted(wrapper, adapters))
    try:
        with parametrize.cached():
            yield
    finally:
        del parametrizations[-1]


class _Adapted(nn.Module):
    """A parametrization: weights with the products of their adapters added."""

    def __init__(self, wrapper: Any, adapters: list[str]) -> None:
        super().__init__()
        self.factors = [
            _factors(wrapper, adapter) for adapter in adapters if adapter in wrapper.lora_A
        ]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(values.device.type, enabled=False):
            for one, other, scale in self.factors:
                values = torch.baddbmm(
                    values, one.to(values.dtype), other.to(values.dtype), alpha=scale
                )
        return values


def _factors(wrapper: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The two matrices of each expert, and their scale, in the layout that peft gives them."""
    one = wrapper.lora_A[adapter].weight
    other = wrapper.lora_B[adapter].weight
    one = one.reshape(wrapper.num_experts, -1, one.shape[-1])
    other = other.reshape(other.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    pair = (other, one) if wrapper._did_swap_in_out_features else (one.mT, other.mT)
    return *pair, wrapper.scaling[adapter]


def plain_experts(module: Any, dtype: torch.dtype) -> nn.Module:
    """Experts without adapters, which are added to their weights, and with plain parameters. They are added before the
    values are rounded to `dtype`."""
    experts = module
    deltas = {}
    while adapts_parameter(experts):
        deltas[experts.parameter_name] = _Adapted(experts, experts.active_adapters)
        experts = experts.base_layer
    plain = {name: stored[0](stored.original) for name, stored in quantised_weights(experts)}
    # not by torch, which would change the class, and with it the model of which this is a copy
    if plain:
        experts.__class__ = parametrize.type_before_parametrizations(experts)
        del experts.parametrizations
    for name in {**plain, **deltas}:
        values = plain[name] if name in plain else experts._parameters[name]
        values = deltas[name](values.float()) if name in deltas else values
        experts._parameters[name] = nn.Parameter(values.to(dtype), requires_grad=False)
    return experts  # type: ignore[no-any-return]


def reach(model: nn.Module) -> str | None:
    """Which shares of a mixture's weights adapters and quantisation reach, in a sentence; None where there are no
    experts. Asked before weights are stored, while all have their full size."""
    experts = list(expert_weights(model))
    if not experts:
        return None
    total = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name
    )
    adapted = quantised = 0
    bare = {id(weight.parameter): weight.module_name for weight in experts}
    modules: list[Any] = list(model.modules())
    for module in modules:
        quantised += module.weight.numel() if hasattr(module, "stands_for") else 0
        quantised += sum(stored.original.numel() for _, stored in quantised_weights(module))
        if hasattr(module, "lora_A"):
            weight = (
                module.get_param() if adapts_parameter(module) else module.get_base_layer().weight
            )
            adapted += weight.numel()
            bare.pop(id(weight), None)
    note = f"adapters reach {_percent(adapted, total)} of this mixture's weights"
    note += f" and quantisation {_percent(quantised, total)}" if quantised else ""
    name = next((name.rpartition(".")[2] for name in bare.values()), None)
    return f"{note}; +{name} in lora_targets adapts its experts." if name else f"{note}."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %"
