"""Experts of a mixture, and their quantised form, to which peft's adapters are added.

transformers holds their weights in no layers, but as parameters of three dimensions, a matrix for
each expert.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from autofit.setup.adapters import plain_name
from autofit.setup.layers import children_of


class ExpertWeight(NamedTuple):
    """One parameter of all experts: a matrix for each.

    Attributes:
        module: holds it under `name`.
        parameter: [experts, ., .].
    """

    module_name: str
    module: nn.Module
    name: str
    parameter: torch.Tensor

    @property
    def full_name(self) -> str:
        """As in the state dict of the model without adapters."""
        return f"{self.module_name}.{self.name}"


def expert_weights(model: nn.Module) -> Iterator[ExpertWeight]:
    """The weights of all experts; of quantised ones, as they are stored.

    Experts are found by the name of their module or its class: many other parameters have three
    dimensions. Names are as they were without adapters.
    """
    for name, module in model.named_modules():
        module_name = plain_name(name)
        last = module_name.rpartition(".")[2]
        if "expert" not in f"{type(module).__name__} {last}".lower():
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
    """A parametrization: the values of a quantised parameter, made anew for each forward that reads
    it. bitsandbytes' own needs the values before; this one stores them when they are made."""

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
            scales = scales.div_(127).view(*values.shape[:-1], 1)
            self.state = (scales, values.dtype)
            constants = [scales]
        else:
            double = self.value == "nf4-dq"
            stored, state = quantize_4bit(values, compress_statistics=double, quant_type="nf4")
            self.state = state
            constants = [state.absmax, state.code]
            if double:
                constants += [state.offset, state.state2.absmax, state.state2.code]

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
    """Make peft's adapter of a parameter work where that is quantised.

    peft 0.21 leaves its parametrization behind beside another one, and with two parameters of a
    module reads the second one's values before adding its adapter.
    """
    quantised = dict(quantised_weights(wrapper.get_base_layer()))
    if wrapper.parameter_name in quantised:
        wrapper._activate_lora = functools.partial(_activated, wrapper)


def nest_in_order(model: nn.Module) -> None:
    """Nest peft's adapters of quantised experts in the order of their parameters, the first one
    innermost, as peft does beside plain ones.

    The names of saved adapters follow the nesting, so plain peft reads them on the unquantised
    model. By itself peft 0.21 nests adapters of parametrized experts in the alphabet's order.
    """
    for parent, name, child in children_of(model):
        if adapts_parameter(parent) or not adapts_parameter(child):
            continue

        wrappers = []
        experts: Any = child
        while adapts_parameter(experts):
            wrappers.append(experts)
            experts = experts.base_layer

        order = [own for own, _ in quantised_weights(experts)]
        if not order:
            continue

        nested = experts
        for wrapper in sorted(wrappers, key=lambda wrapper: order.index(wrapper.parameter_name)):
            wrapper.base_layer = nested
            nested = wrapper
        setattr(parent, name, nested)


@contextmanager
def _activated(wrapper: Any, adapters: list[str]) -> Iterator[None]:
    """Add adapters to the values of a quantised parameter, as long as a forward runs."""
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
        known = [adapter for adapter in adapters if adapter in wrapper.lora_A]
        self.factors = [_factors(wrapper, adapter) for adapter in known]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        dtype = values.dtype
        with torch.autocast(values.device.type, enabled=False):
            for one, other, scale in self.factors:
                values = torch.baddbmm(values, one.to(dtype), other.to(dtype), alpha=scale)
        return values


def _factors(wrapper: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The two matrices of each expert, in the layout that peft gives them, and their scale.

    Returns:
        [experts, rows, rank], [experts, rank, columns], and a number.
    """
    one = wrapper.lora_A[adapter].weight
    one = one.reshape(wrapper.num_experts, -1, one.shape[-1])
    other = wrapper.lora_B[adapter].weight
    other = other.reshape(other.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)

    scale = wrapper.scaling[adapter]
    if wrapper._did_swap_in_out_features:
        return other, one, scale
    return one.mT, other.mT, scale


def plain_experts(module: Any, dtype: torch.dtype) -> nn.Module:
    """Experts with plain parameters and without adapters, which are added to their weights before
    those are rounded to `dtype`."""
    experts = module
    deltas = {}
    while adapts_parameter(experts):
        deltas[experts.parameter_name] = _Adapted(experts, experts.active_adapters)
        experts = experts.base_layer

    plain = {}
    for name, stored in quantised_weights(experts):
        plain[name] = stored[0](stored.original)
    # not by torch, which would change the class, and with it the model of which this is a copy
    if plain:
        experts.__class__ = parametrize.type_before_parametrizations(experts)
        del experts.parametrizations

    for name in deltas:
        if name not in plain:
            plain[name] = experts._parameters[name]
    for name, values in plain.items():
        if name in deltas:
            values = deltas[name](values.float())
        experts._parameters[name] = nn.Parameter(values.to(dtype), requires_grad=False)
    return experts  # type: ignore[no-any-return]


def reach(model: nn.Module) -> str | None:
    """Which shares of a mixture's weights adapters and quantisation reach, in a sentence.

    None where there are no experts. Asked before weights are stored, while all have their full
    size.
    """
    experts = list(expert_weights(model))
    if not experts:
        return None

    named = model.named_parameters()
    total = sum(parameter.numel() for name, parameter in named if "lora_" not in name)

    adapted = 0
    quantised = 0
    without = {id(weight.parameter): weight.module_name for weight in experts}

    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "stands_for"):
            quantised += module.weight.numel()
        quantised += sum(stored.original.numel() for _, stored in quantised_weights(module))

        if hasattr(module, "lora_A"):
            weight = (
                module.get_param() if adapts_parameter(module) else module.get_base_layer().weight
            )
            adapted += weight.numel()
            without.pop(id(weight), None)

    note = f"adapters reach {_percent(adapted, total)} of this mixture's weights"
    if quantised:
        note += f" and quantisation {_percent(quantised, total)}"
    for module_name in without.values():
        name = module_name.rpartition(".")[2]
        if name:
            return f"{note}; +{name} in lora_targets adapts its experts."
    return f"{note}."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %"
