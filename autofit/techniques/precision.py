"""precision: the number formats of weights, gradients, optimizer state and arithmetic."""

import functools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autofit.core.knobs.optimizer import KEEP_SMALL_UPDATES
from autofit.core.knobs.precision import KNOB
from autofit.setup import (
    Config,
    Hardware,
    RefusedError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
    requirements,
)
from autofit.setup.layers import output_heads

_FP32_PRODUCTS = {"fp32": "ieee", "tf32": "tf32"}  # how fp32 products are rounded
_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_FORMATS = {  # of trained weights with their gradients and state, and of frozen weights
    "fp32": (_FP32, _FP32),
    "tf32": (_FP32, _FP32),
    "bf16": (_BF16, _BF16),
    "bf16-mixed": (_FP32, _BF16),
    "fp16-mixed": (_FP32, _FP16),
    "fp8": (_BF16, _BF16),
}
_AUTOCAST = {"bf16-mixed": _BF16, "fp16-mixed": _FP16}  # what products are computed in
_AMPERE = (8, 0)  # first compute capability with bf16 and tf32 matrix units
_ADA = (8, 9)  # and with fp8 ones
_FP8_MULTIPLE = 16  # of which every dimension of an fp8 product must be a multiple


class Precision(Technique):
    """The number formats.

    `fp32`: everything, convolutions too. `tf32`: fp32, rounded to 10 bits of mantissa by matrix units. `bf16`: weights,
    gradients, optimizer state and arithmetic. `bf16-mixed`, `fp16-mixed`: trained weights, gradients and state in fp32;
    frozen weights and arithmetic (autocast) in the low format; frozen weights that must return in fp32 stay in it.
    `fp8`: as `bf16`, with linear layers but the output head multiplied in fp8, scaled per tensor (torchao;
    Micikevicius et al. 2022, arXiv 2209.05433).
    """

    record = KNOB
    stage = Stage.WEIGHTS
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        if hardware.device == "cpu":
            # CPUs have no fp16 arithmetic: a matmul was 38 times slower than in fp32. Allowed, not searched.
            return ("fp32", "bf16", "bf16-mixed")
        if requirements.too_old(hardware, _AMPERE):
            return ("fp32", "fp16-mixed")
        # without fp8
        return self.values[:-1] if requirements.too_old(hardware, _ADA) else self.values

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """Where weights must return in their formats: the values that store them so; else those that lose no digits."""
        values = self.choices(hardware)
        if workload.keeps is None:
            return values
        pairs = {value: _stored_and_given(value, workload) for value in values}
        same = (value for value in values if all(stored == given for stored, given in pairs[value]))
        lossless = (
            value
            for value in values
            if all(_contains(stored, given) for stored, given in pairs[value])
        )
        widest = (value for value in values if _formats(value, workload) == (_FP32, _FP32))
        return tuple(same) or tuple(lossless) or tuple(widest)

    def package(self, value: Value) -> str:
        return "torchao" if value == "fp8" else "torch"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        if hardware.device == "cpu":
            units = {
                "tf32": "tf32 is a format of GPU matrix units",
                "fp8": "fp8 products need GPU matrix units",
            }
            return (
                f"{units[value]}; use {'fp32' if value == 'tf32' else 'bf16'} on a CPU."
                if value in units
                else None
            )
        needed = (
            _ADA
            if value == "fp8"
            else _AMPERE
            if value in ("tf32", "bf16", "bf16-mixed")
            else (0, 0)
        )
        if lacking := requirements.too_old(hardware, needed):
            instead = "fp16-mixed or fp32" if requirements.too_old(hardware, _AMPERE) else "bf16"
            return f"{value} needs {lacking}; use {instead}."
        if value != "fp8":
            return None
        if lacking := requirements.missing("torchao"):
            return f"fp8 needs {lacking}, or use bf16."
        rows = (config.micro_batch_size or 1) * (workload.sequence_length or _FP8_MULTIPLE)
        if rows % _FP8_MULTIPLE:
            message = f"fp8 products need a multiple of {_FP8_MULTIPLE} tokens in a micro-batch, not {rows}"
            return f"{message}; choose another micro_batch_size or sequence length, or use bf16."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value == "fp8":
            _multiply_in_fp8(setup)
        if value in _FP32_PRODUCTS:
            # By default PyTorch rounds convolutions and recurrent layers to TF32, and plain products not.
            setup.on_close(_Fp32Products.now().set)
            _Fp32Products.to(_FP32_PRODUCTS[str(value)]).set()
        setup.weights.trainable_dtype, setup.weights.frozen_dtype = _formats(value, setup.workload)
        changed = {
            str(given)[6:]
            for stored, given in _stored_and_given(value, setup.workload)
            if stored != given
        }
        if changed:
            names = " and ".join(sorted(changed))
            setup.warnings.append(
                f"weights in {names} are trained in another format and rounded back at the end."
            )
        if value in ("bf16", "fp8"):
            _cast_inputs(setup, torch.bfloat16)
            if not setup.config.lora_rank and setup.config.optimizer not in KEEP_SMALL_UPDATES:
                keep = (
                    f"bf16-mixed keeps them, as do the optimizers {', '.join(KEEP_SMALL_UPDATES)}"
                )
                setup.warnings.append(
                    f"bf16 weights lose updates smaller than 1/256 of the weight; {keep}."
                )
            return
        low = _AUTOCAST.get(str(value))
        frozen_low = low if setup.weights.frozen_dtype == low and _some_stay_frozen(setup) else None
        given = {
            parameter.dtype
            for parameter in setup.model.parameters()
            if parameter.is_floating_point()
        }
        if frozen_low:  # a frozen norm in the low format cannot take fp32 features
            _cast_inputs(setup, frozen_low)
        elif given - {_FP32}:  # a model made in another format comes with inputs in it
            _cast_inputs(setup, _FP32)
        if torch.float64 in given:
            setup.warnings.append("the model's float64 weights are trained in float32.")
        if low:
            if frozen_low and not any(parameter.is_meta for parameter in setup.model.parameters()):
                name = str(low).removeprefix("torch.")
                setup.warnings.append(
                    f"the model comes back with frozen weights in {name} and trained ones in float32: run it under "
                    f'torch.autocast("{setup.device.type}", torch.{name}), or cast it with model.to(torch.{name}).'
                )
            device = setup.device.type
            # Its cache would hold low-precision copies of all weights until the forward is over. Where nothing is
            # recomputed, the backward needs them anyway.
            caches = setup.config.activation_checkpointing == "none"
            setup.forward_contexts.append(
                lambda: torch.autocast(device, dtype=low, cache_enabled=caches)
            )
            if value == "fp16-mixed":
                setup.scaler = torch.amp.grad_scaler.GradScaler(device)


def _formats(value: Value, workload: Workload) -> tuple[torch.dtype, torch.dtype]:
    """The formats of trained and of frozen weights. Beside autocast, frozen weights that must return in fp32 stay in it
    as trained ones do: in the low format they would lose digits for good."""
    trained, frozen = _FORMATS[str(value)]
    if value in _AUTOCAST and workload.keeps and "float32" in workload.keeps[1]:
        frozen = _FP32
    return trained, frozen


def _stored_and_given(value: Value, workload: Workload) -> list[tuple[torch.dtype, torch.dtype]]:
    """(format under this value, given format) of every kind of weights that must return as they came."""
    both = zip(_formats(value, workload), workload.keeps or ((), ()), strict=True)
    return [(stored, getattr(torch, name)) for stored, names in both for name in names]


def _contains(stored: torch.dtype, given: torch.dtype) -> bool:
    """Whether a format has all the digits and the range of another."""
    return (
        torch.finfo(stored).eps <= torch.finfo(given).eps
        and torch.finfo(stored).max >= torch.finfo(given).max
    )


def _multiply_in_fp8(setup: Setup) -> None:
    """Replace linear layers by torchao's, which share the weights and cast to fp8 around each product. Raises
    RefusedError where no layer has the shape for it."""
    from torchao.float8 import convert_to_float8_training

    heads = output_heads(setup.model)

    def chosen(layer: nn.Module, _: str = "") -> bool:
        shape = layer.weight.shape if type(layer) is nn.Linear else (1,)
        return layer not in heads and not any(size % _FP8_MULTIPLE for size in shape)

    layers = [
        (parent, *child) for parent in setup.model.modules() for child in parent.named_children()
    ]
    replaced = [(parent, name, layer) for parent, name, layer in layers if chosen(layer)]
    if not replaced:
        message = (
            f"no linear layer has both sizes a multiple of {_FP8_MULTIPLE}, as fp8 products need"
        )
        raise RefusedError(f"{message}; use bf16.")
    convert_to_float8_training(setup.model, module_filter_fn=chosen)
    for parent, own, layer in replaced:
        _pad_rows(getattr(parent, own))
        setup.on_close(functools.partial(_put_back, parent, own, layer))


def _pad_rows(layer: nn.Module) -> None:
    """Pad inputs with rows of zeros to a multiple of 16, without which torch refuses the product in the backward.
    Needed for texts padded to the longest of a batch, a last batch, or the 197 tokens of an image. torchao's
    `pad_inner_dim` would copy the operands of every product."""
    product = layer.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        missing = -rows % _FP8_MULTIPLE
        if not missing:
            return product(inputs)  # type: ignore[no-any-return]
        padded = functional.pad(inputs.reshape(rows, -1), (0, 0, 0, missing))
        return product(padded)[:rows].reshape(*inputs.shape[:-1], -1)  # type: ignore[no-any-return]

    layer.forward = forward


def _put_back(parent: nn.Module, name: str, layer: nn.Module) -> None:
    """Restore the plain layer, below adapters where there are some by now."""
    adapted = getattr(parent, name)
    owner, name = (adapted, "base_layer") if hasattr(adapted, "base_layer") else (parent, name)
    setattr(owner, name, layer)


@dataclass(frozen=True)
class _Fp32Products:
    """How a card rounds fp32 products: by PyTorch's older switches, and by the newer one of each kind of product. Both
    are set, because parts of PyTorch still read the older ones, which raise where the two contradict each other. Where
    a user has set such a contradiction, the older ones (None) are not restored."""

    matmul: str | None
    convolution: bool | None
    newer: tuple[str, ...]

    @classmethod
    def now(cls) -> Self:
        matmul = convolution = None
        with suppress(RuntimeError):
            matmul = torch.get_float32_matmul_precision()
        with suppress(RuntimeError):
            convolution = bool(torch.backends.cudnn.allow_tf32)
        return cls(
            matmul, convolution, tuple(str(backend.fp32_precision) for backend in _backends())
        )

    @classmethod
    def to(cls, precision: str) -> Self:
        tf32 = precision == "tf32"
        return cls("high" if tf32 else "highest", tf32, tuple(precision for _ in _backends()))

    def set(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.convolution is not None:
            torch.backends.cudnn.allow_tf32 = self.convolution
        for backend, precision in zip(_backends(), self.newer, strict=True):
            backend.fp32_precision = precision


def _backends() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul


def _some_stay_frozen(setup: Setup) -> bool:
    return bool(setup.config.lora_rank or setup.config.head_only) or any(
        not p.requires_grad for p in setup.model.parameters()
    )


def _cast_inputs(setup: Setup, dtype: torch.dtype) -> None:
    """Cast floating inputs (images, features) to the weights' dtype as they enter the model; labels stay."""

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def to(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return tree_map_only(torch.Tensor, to, (args, kwargs))  # type: ignore[no-any-return]

    setup.on_close(setup.model.register_forward_pre_hook(cast, with_kwargs=True).remove)
