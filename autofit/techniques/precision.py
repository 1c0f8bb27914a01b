"""precision: the number formats of weights, gradients, optimizer state and arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.layers import output_heads

_FIDELITY = {"fp32": 5, "tf32": 4, "bf16-mixed": 3, "fp16-mixed": 2, "bf16": 1, "fp8": 0}
_ROUNDINGS = {"fp32": "ieee", "tf32": "tf32"}  # of the products of fp32 numbers
_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_HELD = {  # the formats of trained weights, their gradients and state, and of frozen weights
    "fp32": (_FP32, _FP32),
    "tf32": (_FP32, _FP32),
    "bf16": (_BF16, _BF16),
    "bf16-mixed": (_FP32, _BF16),
    "fp16-mixed": (_FP32, _FP16),
    "fp8": (_BF16, _BF16),
}
_AMPERE = (8, 0)  # first compute capability with bf16 and tf32 matrix units
_ADA = (8, 9)  # and with fp8 ones
_FP8_MULTIPLE = 16  # what every dimension of an fp8 product must be a multiple of


class Precision(Technique):
    """The ways of holding and computing numbers.

    `fp32`: everything, convolutions too. `tf32`: fp32 that matrix units round to 10 bits of mantissa. `bf16`: weights,
    gradients, optimizer state and arithmetic. `bf16-mixed`, `fp16-mixed`: trained weights, their gradients and state in
    fp32; frozen weights and arithmetic (autocast) in the low format. `fp8`: as `bf16`, with the products of linear
    layers in fp8, scaled tensor by tensor (torchao; Micikevicius et al. 2022, arXiv 2209.05433), the output head left
    out.
    """

    name = "precision"
    stage = Stage.WEIGHTS
    off = "fp32"
    values = ("fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed", "fp8")
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        if hardware.device == "cpu":
            # CPUs have no fp16 arithmetic: a matmul was measured 38 times slower than fp32. Allowed, not searched.
            return ("fp32", "bf16", "bf16-mixed")
        if hardware.capability and hardware.capability < _AMPERE:
            return ("fp32", "fp16-mixed")
        if hardware.capability and hardware.capability < _ADA:
            return tuple(value for value in self.values if value != "fp8")
        return self.values

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """Where weights are to come back as they came: what holds them so; else what loses none of their digits."""
        offered = self.choices(hardware)
        if workload.keeps is None:
            return offered
        pairs = {value: _held_and_given(value, workload) for value in offered}
        kept = (value for value in offered if all(held == given for held, given in pairs[value]))
        exact = (value for value in offered if all(_holds(held, given) for held, given in pairs[value]))
        widest = (value for value in offered if _HELD[str(value)] == (_FP32, _FP32))
        return tuple(kept) or tuple(exact) or tuple(widest)

    def package(self, value: Value) -> str:
        return "torchao" if value == "fp8" else "torch"

    def fidelity(self, value: Value) -> int:
        return _FIDELITY[str(value)]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        if hardware.device == "cpu":
            units = {"tf32": "tf32 is a format of GPU matrix units", "fp8": "fp8 products need GPU matrix units"}
            return f"{units[value]}; use {'fp32' if value == 'tf32' else 'bf16'} on a CPU." if value in units else None
        needed = _ADA if value == "fp8" else _AMPERE if value in ("tf32", "bf16", "bf16-mixed") else None
        if needed and hardware.capability and hardware.capability < needed:
            has, needs = (".".join(str(part) for part in each) for each in (hardware.capability, needed))
            instead = "bf16" if hardware.capability >= _AMPERE else "fp16-mixed or fp32"
            return f"{value} needs compute capability {needs}, {hardware.name} has {has}; use {instead}."
        return _against_fp8(config, workload) if value == "fp8" else None

    def apply(self, setup: Setup, value: Value) -> None:
        if value == "fp8":
            _multiply_in_fp8(setup)
        if value in _ROUNDINGS:
            _round_fp32_products(setup, _ROUNDINGS[str(value)])
        setup.trainable_dtype, frozen = _HELD[str(value)]
        setup.frozen_dtype = frozen
        changed = {str(given)[6:] for held, given in _held_and_given(value, setup.workload) if held != given}
        if changed:
            names = " and ".join(sorted(changed))
            setup.warnings.append(f"weights in {names} are held in another format until the end, and rounded back.")
        if value in ("bf16", "fp8"):
            _cast_inputs(setup, torch.bfloat16)
            if not setup.config.get("lora_rank"):
                setup.warnings.append(
                    "bf16 weights lose updates smaller than 1/256 of the weight; bf16-mixed keeps them."
                )
            return
        low = None if frozen == _FP32 else frozen
        given = {parameter.dtype for parameter in setup.model.parameters() if parameter.is_floating_point()}
        if low and _some_stay_frozen(setup):  # a frozen norm is held in the low format, and cannot take fp32 features
            _cast_inputs(setup, low)
        elif given - {_FP32}:  # a model made in another format comes with inputs in it
            _cast_inputs(setup, _FP32)
        if torch.float64 in given:
            setup.warnings.append("the model's float64 weights are held and trained in float32.")
        if low:
            _warn_of_two_formats(setup, low)
            device = setup.device.type
            setup.forward_contexts.append(lambda: torch.autocast(device, dtype=low))
            if value == "fp16-mixed":
                setup.scaler = torch.amp.grad_scaler.GradScaler(device)


def _held_and_given(value: Value, workload: Workload) -> list[tuple[torch.dtype, torch.dtype]]:
    """How a value holds each kind of weights that is to come back as it came, and how that is."""
    both = zip(_HELD[str(value)], workload.keeps or ((), ()), strict=True)
    return [(held, getattr(torch, name)) for held, names in both for name in names]


def _holds(held: torch.dtype, given: torch.dtype) -> bool:
    """Whether a format has all the digits and the range of another."""
    one, other = torch.finfo(held), torch.finfo(given)
    return one.eps <= other.eps and one.max >= other.max


def _against_fp8(config: Config, workload: Workload) -> str | None:
    if not requirements.installed("torchao"):
        return "fp8 needs torchao, which is not installed; pip install torchao, or use bf16."
    rows = int(config["micro_batch_size"] or 1) * (workload.sequence_length or _FP8_MULTIPLE)
    if rows % _FP8_MULTIPLE:
        message = f"fp8 products need a multiple of {_FP8_MULTIPLE} tokens in a micro-batch, not {rows}"
        return f"{message}; choose another micro_batch_size or sequence length, or use bf16."
    return None


def _multiply_in_fp8(setup: Setup) -> None:
    """Exchange linear layers for torchao's, which hold the same weights and cast to fp8 around each product.

    Raises:
        RefusedError: no layer has the shape for it.
    """
    from torchao.float8 import convert_to_float8_training

    heads = output_heads(setup.model)
    places = {
        name: (parent, own, child)
        for prefix, parent in setup.model.named_modules()
        for own, child in parent.named_children()
        for name in (f"{prefix}.{own}" if prefix else own,)
    }

    def chosen(layer: nn.Module, name: str) -> bool:
        shape = layer.weight.shape if type(layer) is nn.Linear else (1,)
        return layer not in heads and not any(size % _FP8_MULTIPLE for size in shape)

    exchanged = [places[name] for name, layer in setup.model.named_modules() if name in places and chosen(layer, name)]
    if not exchanged:
        message = f"no linear layer has both sizes a multiple of {_FP8_MULTIPLE}, as fp8 products need"
        raise RefusedError(f"{message}; use bf16.")
    convert_to_float8_training(setup.model, module_filter_fn=chosen)
    for parent, own, layer in exchanged:
        _fill_up_rows(getattr(parent, own))
        setup.on_close(functools.partial(_put_back, parent, own, layer))


def _fill_up_rows(layer: nn.Module) -> None:
    """Give a product whose rows are no multiple of 16 some of zeros, without which torch refuses it in the backward.

    Of texts padded to the longest of a batch, the last batch of a pass, or the 197 tokens of an image. Not by torchao's
    `pad_inner_dim`, which copies the operands of every product.
    """
    product = layer.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        missing = -rows % _FP8_MULTIPLE
        if not missing:
            return product(inputs)  # type: ignore[no-any-return]
        filled = functional.pad(inputs.reshape(rows, -1), (0, 0, 0, missing))
        return product(filled)[:rows].reshape(*inputs.shape[:-1], -1)  # type: ignore[no-any-return]

    layer.forward = forward


def _put_back(parent: nn.Module, name: str, layer: nn.Module) -> None:
    """The plain layer in its old place, or below the adapters that have come to stand there."""
    adapted = getattr(parent, name)
    if hasattr(adapted, "base_layer"):
        adapted.base_layer = layer
    else:
        setattr(parent, name, layer)


@dataclass(frozen=True)
class _Rounding:
    """How a card multiplies fp32 numbers: by PyTorch's older switches, and by the newer one of each kind of product.

    Both are set, because parts of PyTorch still ask the older ones, which raise where the two contradict each other.
    Where a user has set such a contradiction, there is nothing older to give back.
    """

    matmul: str | None
    convolution: bool | None
    newer: tuple[str, ...]

    @classmethod
    def now(cls) -> _Rounding:
        newer = tuple(str(each.fp32_precision) for each in _products())
        return cls(
            _told(torch.get_float32_matmul_precision), _told(lambda: bool(torch.backends.cudnn.allow_tf32)), newer
        )

    @classmethod
    def to(cls, precision: str) -> _Rounding:
        tf32 = precision == "tf32"
        return cls("high" if tf32 else "highest", tf32, tuple(precision for _ in _products()))

    def set(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.convolution is not None:
            torch.backends.cudnn.allow_tf32 = self.convolution
        for each, precision in zip(_products(), self.newer, strict=True):
            each.fp32_precision = precision


def _products() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul


def _told(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except RuntimeError:
        return None


def _round_fp32_products(setup: Setup, precision: str) -> None:
    """By itself PyTorch rounds convolutions and recurrent layers to TF32, and plain products not."""
    before = _Rounding.now()
    setup.on_close(before.set)
    _Rounding.to(precision).set()


def _warn_of_two_formats(setup: Setup, low: torch.dtype) -> None:
    living = not any(parameter.is_meta for parameter in setup.model.parameters())
    if living and _some_stay_frozen(setup):
        name = str(low).removeprefix("torch.")
        setup.warnings.append(
            f"the model comes back with frozen weights in {name} and trained ones in float32: run it under "
            f'torch.autocast("{setup.device.type}", torch.{name}), or cast it with model.to(torch.{name}).'
        )


def _some_stay_frozen(setup: Setup) -> bool:
    return bool(setup.config.get("lora_rank")) or any(not p.requires_grad for p in setup.model.parameters())


def _cast_inputs(setup: Setup, dtype: torch.dtype) -> None:
    """Floating inputs (images, features) follow the weights' dtype when they enter the model; labels outside do not."""

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def to(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return tree_map_only(torch.Tensor, to, (args, kwargs))  # type: ignore[no-any-return]

    handle = setup.model.register_forward_pre_hook(cast, with_kwargs=True)
    setup.on_close(handle.remove)
