"""precision: the number formats of weights, gradients, optimizer state and arithmetic."""

import functools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autofit.core.faithfulness import loses_updates
from autofit.core.knobs.optimizer import KEEP_SMALL_UPDATES
from autofit.core.knobs.precision import BF16_WEIGHTS, KNOB
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
from autofit.setup.layers import children_of, output_heads
from autofit.setup.streamed_blocks import is_whole

_FP32_PRODUCTS = {"fp32": "ieee", "tf32": "tf32"}  # how fp32 products are rounded
_FP32 = torch.float32
_BF16 = torch.bfloat16
_FP16 = torch.float16
# Of trained weights with their gradients and state, and of frozen weights.
_FORMATS = {
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
_NEEDED = {"tf32": _AMPERE, "bf16": _AMPERE, "bf16-mixed": _AMPERE, "fp8": _ADA}
_REFUSED_ON_CPU = {
    "tf32": "tf32 is a format of GPU matrix units; use fp32 on a CPU.",
    "fp8": "fp8 products need GPU matrix units; use bf16 on a CPU.",
}
_FP8_MULTIPLE = 16  # of which every dimension of an fp8 product must be a multiple


class Precision(Technique):
    """The number formats.

    `fp32`: everything, convolutions too. `tf32`: fp32, rounded to 10 bits of mantissa by matrix
    units. `bf16`: weights, gradients, optimizer state and arithmetic. `bf16-mixed`, `fp16-mixed`:
    trained weights, gradients and state in fp32; frozen weights and arithmetic (autocast) in the
    low format; frozen weights that must return in fp32 stay in it. `fp8`: as `bf16`, with linear
    layers but the output head multiplied in fp8, scaled per tensor (torchao; Micikevicius et al.
    2022, arXiv 2209.05433).
    """

    record = KNOB
    stage = Stage.WEIGHTS
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        if hardware.device == "cpu":
            # CPUs have no fp16 arithmetic: a matmul was 38 times slower than in fp32. Allowed, not
            # searched.
            return ("fp32", "bf16", "bf16-mixed")
        if requirements.too_old(hardware, _AMPERE):
            return ("fp32", "fp16-mixed")
        if requirements.too_old(hardware, _ADA):
            return self.values[:-1]  # without fp8
        return self.values

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """Where weights must return in their formats: the values that store them so; else those
        that lose no digits."""
        values = self.choices(hardware)
        if workload.keeps is None:
            return values

        same = []
        lossless = []
        widest = []
        for value in values:
            pairs = _stored_and_given(value, workload)
            if all(stored == given for stored, given in pairs):
                same.append(value)
            if all(_contains(stored, given) for stored, given in pairs):
                lossless.append(value)
            if _formats(value, workload) == (_FP32, _FP32):
                widest.append(value)

        return tuple(same or lossless or widest)

    def package(self, value: Value) -> str:
        return "torchao" if value == "fp8" else "torch"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        if hardware.device == "cpu":
            return _REFUSED_ON_CPU.get(value)

        needed = _NEEDED.get(value, (0, 0))
        if lacking := requirements.too_old(hardware, needed):
            instead = "fp16-mixed or fp32" if requirements.too_old(hardware, _AMPERE) else "bf16"
            return f"{value} needs {lacking}; use {instead}."
        if value != "fp8":
            return None

        if lacking := requirements.missing("torchao"):
            return f"fp8 needs {lacking}, or use bf16."
        rows = (config.micro_batch_size or 1) * (workload.sequence_length or _FP8_MULTIPLE)
        if rows % _FP8_MULTIPLE:
            return (
                f"fp8 products need a multiple of {_FP8_MULTIPLE} tokens in a micro-batch, not "
                f"{rows}; choose another micro_batch_size or sequence length, or use bf16."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value == "fp8":
            _multiply_in_fp8(setup)
        if value in _FP32_PRODUCTS:
            # By default PyTorch rounds convolutions and recurrent layers to TF32, and plain
            # products not.
            setup.on_close(_Fp32Products.now().set)
            _Fp32Products.to(_FP32_PRODUCTS[str(value)]).set()

        setup.weights.trainable_dtype, setup.weights.frozen_dtype = _formats(value, setup.workload)
        _warn_of_other_formats(setup, value)
        if value in BF16_WEIGHTS:
            _cast_inputs(setup, torch.bfloat16)
            if loses_updates(setup.config):
                names = ", ".join(KEEP_SMALL_UPDATES)
                setup.warnings.append(
                    "bf16 weights lose updates smaller than 1/256 of the weight; bf16-mixed keeps "
                    f"them, as do the optimizers {names}."
                )
            return

        low = _AUTOCAST.get(str(value))
        frozen_low = None
        if setup.weights.frozen_dtype == low and _some_stay_frozen(setup):
            frozen_low = low

        parameters = list(setup.model.parameters())
        given = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        if frozen_low:  # a frozen norm in the low format cannot take fp32 features
            _cast_inputs(setup, frozen_low)
        elif given - {_FP32}:  # a model made in another format comes with inputs in it
            _cast_inputs(setup, _FP32)

        if torch.float64 in given:
            setup.warnings.append("the model's float64 weights are trained in float32.")
        if not low:
            return

        device = setup.device.type
        if frozen_low and not any(parameter.is_meta for parameter in parameters):
            name = str(low).removeprefix("torch.")
            setup.warnings.append(
                f"the model comes back with frozen weights in {name} and trained ones in float32: "
                f'run it under torch.autocast("{device}", torch.{name}), or cast it with '
                f"model.to(torch.{name})."
            )

        # Its cache would hold low-precision copies of all weights until the forward is over. Where
        # nothing is recomputed, the backward needs them anyway.
        caches = setup.config.activation_checkpointing == "none"
        setup.forward_contexts.append(
            lambda: torch.autocast(device, dtype=low, cache_enabled=caches)
        )

        if value == "fp16-mixed":
            setup.scaler = torch.amp.grad_scaler.GradScaler(device)


def _warn_of_other_formats(setup: Setup, value: Value) -> None:
    """Warn where weights that must return as they came are trained in another format."""
    changed = set()
    for stored, given in _stored_and_given(value, setup.workload):
        if stored != given:
            changed.add(str(given).removeprefix("torch."))

    if changed:
        names = " and ".join(sorted(changed))
        setup.warnings.append(
            f"weights in {names} are trained in another format and rounded back at the end."
        )


def _formats(value: Value, workload: Workload) -> tuple[torch.dtype, torch.dtype]:
    """The formats of trained and of frozen weights.

    Beside autocast, frozen weights that must return in fp32 stay in it as trained ones do: in the
    low format they would lose digits for good.
    """
    trained, frozen = _FORMATS[str(value)]
    if value in _AUTOCAST and workload.keeps and "float32" in workload.keeps[1]:
        frozen = _FP32
    return trained, frozen


def _stored_and_given(value: Value, workload: Workload) -> list[tuple[torch.dtype, torch.dtype]]:
    """(format under this value, given format) of every kind of weights that must return as they
    came."""
    both = zip(_formats(value, workload), workload.keeps or ((), ()), strict=True)
    return [(stored, getattr(torch, name)) for stored, names in both for name in names]


def _contains(stored: torch.dtype, given: torch.dtype) -> bool:
    """Whether a format has all the digits and the range of another."""
    ours = torch.finfo(stored)
    theirs = torch.finfo(given)
    return ours.eps <= theirs.eps and ours.max >= theirs.max


def _multiply_in_fp8(setup: Setup) -> None:
    """Replace linear layers by torchao's, which share the weights and cast to fp8 around each
    product.

    Raises:
        RefusedError: where no layer has the shape for it.
    """
    from torchao.float8 import convert_to_float8_training

    heads = output_heads(setup.model)

    def chosen(layer: nn.Module, _: str = "") -> bool:
        if type(layer) is not nn.Linear or layer in heads:
            return False
        return not any(size % _FP8_MULTIPLE for size in layer.weight.shape)

    replaced = [child for child in children_of(setup.model) if chosen(child[2])]
    if not replaced:
        raise RefusedError(
            f"no linear layer has both sizes a multiple of {_FP8_MULTIPLE}, as fp8 products need; "
            "use bf16."
        )

    convert_to_float8_training(setup.model, module_filter_fn=chosen)
    for parent, name, layer in replaced:
        _pad_rows(getattr(parent, name))
        setup.on_close(functools.partial(_put_back, parent, name, layer))


def _pad_rows(layer: nn.Module) -> None:
    """Pad inputs with rows of zeros to a multiple of 16, without which torch refuses the product in
    the backward.

    Needed for texts padded to the longest of a batch, a last batch, or the 197 tokens of an image.
    torchao's `pad_inner_dim` would copy the operands of every product.
    """
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
    if hasattr(adapted, "base_layer"):
        adapted.base_layer = layer
    else:
        setattr(parent, name, layer)


@dataclass(frozen=True)
class _Fp32Products:
    """How a card rounds fp32 products: by PyTorch's older switches, and by the newer one of each
    kind of product.

    Both are set, because parts of PyTorch still read the older ones, which raise where the two
    contradict each other. Where a user has set such a contradiction, the older ones (None) are not
    restored.
    """

    matmul: str | None
    convolution: bool | None
    newer: tuple[str, ...]

    @classmethod
    def now(cls) -> Self:
        matmul = None
        convolution = None
        with suppress(RuntimeError):
            matmul = torch.get_float32_matmul_precision()
        with suppress(RuntimeError):
            convolution = bool(torch.backends.cudnn.allow_tf32)

        newer = tuple(str(backend.fp32_precision) for backend in _backends())
        return cls(matmul, convolution, newer)

    @classmethod
    def to(cls, precision: str) -> Self:
        tf32 = precision == "tf32"
        newer = (precision,) * len(_backends())
        return cls("high" if tf32 else "highest", tf32, newer)

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
    if not is_whole(setup.config):
        return True
    return any(not parameter.requires_grad for parameter in setup.model.parameters())


def _cast_inputs(setup: Setup, dtype: torch.dtype) -> None:
    """Cast floating inputs (images, features) to the weights' dtype as they enter the model; labels
    stay."""

    def to(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map_only(torch.Tensor, to, (args, kwargs))  # type: ignore[no-any-return]

    setup.on_close(setup.model.register_forward_pre_hook(cast, with_kwargs=True).remove)
