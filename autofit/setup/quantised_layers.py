"""Linear layers whose weights are stored in 8 or 4 bits, of the trained model or of one that it asks.

LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339) and NF4 with or without double quantisation of
its block scales (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes. Layers are replaced
while the model has no weights yet; then each weight is made, or taken from the living model, and
quantised before the next one: building never holds the whole model unquantised.
"""

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autofit.core.errors import RefusedError, describe_error
from autofit.setup.experts import Dequantised, expert_weights
from autofit.setup.layers import (
    children_of,
    is_frozen,
    is_plain_linear,
    is_transposed_linear,
    output_heads,
    tensors_met,
    weights_read_by,
)
from autofit.setup.state import Setup

# Larger activations are multiplied unquantised: LLM.int8()'s threshold, and transformers'.
_OUTLIERS = 6.0
# The same of random weights, whose activations are larger than those of trained ones. With 6,
# nearly all 14336 inputs of an 8B model's MLP held an outlier: a step took 2.5 times as long on an
# H200, and 1.8 GiB more.
_OUTLIERS_OF_RANDOM = 65504.0
_COMPUTE = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_SMALLEST_NESTED = 64  # elements: one block, whose scale is quantised too
# As PyTorch's messages name them.
_WHOLE_NUMBERS = re.compile(r"\b(u?int8|Byte|Char|(un)?signed char)\b")
NO_LINEARS = "the model has no frozen linear layer to quantise; use none."

# (layer, [outputs, inputs]) -> its quantised weight
Store = Callable[[Any, torch.Tensor], nn.Parameter]


def quantise(setup: Setup, model: nn.Module, value: str, knob: str) -> None:
    """Replace a model's layers, and register how their weights will be stored.

    Args:
        value: `int8`, `nf4` or `nf4-dq`.
        knob: the one that asks for it, for refusals.

    Raises:
        RefusedError: where it has no frozen linear layer.
    """
    import bitsandbytes

    _replace(setup, model, value, knob, _store_int8 if value == "int8" else _store_nf4)
    if value == "int8":
        _multiply_rows(setup, bitsandbytes.matmul)


def quantise_fake(setup: Setup, model: nn.Module, value: str, knob: str) -> None:
    """The same with plain parameters: bitsandbytes' tensor subclasses cannot be made of fake
    tensors."""
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    _replace(setup, model, value, knob, _store_fake_int8 if value == "int8" else _store_fake_nf4)
    # bitsandbytes makes its tables of values once for good: before there are fake tensors, or
    # they would be fake.
    quantize_4bit(torch.zeros(_SMALLEST_NESTED), compress_statistics=True, quant_type="nf4")
    setup.patch(bitsandbytes.nn.modules, "fix_4bit_weight_quant_state_from_module", _give_state)
    if value == "int8":
        is_cuda = setup.hardware.device == "cuda"
        _multiply_rows(setup, _as_on_cuda if is_cuda else bitsandbytes.matmul)


def _replace(setup: Setup, model: nn.Module, value: str, knob: str, store: Store) -> None:
    layers = _quantisable(model)
    experts = list(expert_weights(model))
    if not layers and not experts:
        raise RefusedError(NO_LINEARS)

    compute = _COMPUTE.get(setup.config.precision, torch.float32)
    outliers = _OUTLIERS_OF_RANDOM if setup.weights.are_random else _OUTLIERS
    for parent, name, layer in layers:
        quantised: Any = _quantised_layer(layer, value, compute, outliers)
        quantised.stands_for = type(layer)  # for `dequantised`
        quantised.was_frozen = is_frozen(layer)
        setattr(parent, name, quantised)
        stored = functools.partial(_stored, store, quantised, is_transposed_linear(layer))
        setup.weights.holders[quantised, "weight"] = stored

    for weight in experts:
        parametrized = Dequantised.of(weight, value)
        setup.weights.holders[parametrized, "original"] = parametrized[0].store

    setup.forward_contexts.append(functools.partial(_explain, value, knob))
    # peft reads it to choose the adapters for layers of this kind.
    setup.patch(model, "is_loaded_in_8bit" if value == "int8" else "is_loaded_in_4bit", True)

    if value == "int8":
        # bitsandbytes logs at every product, thousands of times a step, that it casts inputs to
        # float16.
        logger = logging.getLogger("bitsandbytes.autograd._functions")
        setup.on_close(functools.partial(logger.setLevel, logger.level))
        logger.setLevel(logging.ERROR)


@contextlib.contextmanager
def _explain(value: str, knob: str) -> Iterator[None]:
    """Refuse where a model's code meets weights that are stored in whole numbers."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        met = tensors_met(error)
        is_quantised = any(
            hasattr(tensor, "quant_state") or hasattr(tensor, "SCB") for tensor in met
        )

        if not is_quantised and not _WHOLE_NUMBERS.search(str(error)):
            raise
        raise RefusedError(
            f"{value} does not fit this model, whose code computes with weights instead of calling "
            f"layers ({describe_error(error)}); use {knob} none."
        ) from error


def _quantisable(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of plain linear layers that share neither weight nor parent, without
    the output heads and those whose weight the parent reads."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))

    heads = {*output_heads(model), *_kept_whole(model)}
    children = children_of(model)
    parents = Counter(child for _, _, child in children)

    found = []
    for parent, name, child in children:
        if not is_plain_linear(child) or child in heads or name in weights_read_by(parent):
            continue
        if uses[id(child.weight)] == 1 and parents[child] == 1:
            found.append((parent, name, child))
    return found


def _kept_whole(model: nn.Module) -> set[nn.Module]:
    """What a class of diffusers names as too fine for low precision, with all inside: Wan casts
    timesteps to the format of these weights."""
    if not type(model).__module__.startswith("diffusers."):
        return set()

    names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept: set[nn.Module] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            kept.update(module.modules())
    return kept


def _quantised_layer(layer: Any, value: str, compute: torch.dtype, outliers: float) -> nn.Module:
    """A layer for the quantised weight; it holds the given one until that is quantised."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    given = layer.weight.detach()
    outputs, inputs = given.shape
    if is_transposed_linear(layer):
        inputs, outputs = given.shape

    options = {"bias": layer.bias is not None, "device": "meta"}
    if value == "int8":
        quantised: Any = Linear8bitLt(
            inputs, outputs, has_fp16_weights=False, threshold=outliers, **options
        )
        quantised.weight = Int8Params(given, requires_grad=False, has_fp16_weights=False)
    else:
        settings = {"compress_statistics": value == "nf4-dq", "quant_type": "nf4"}
        quantised = Linear4bit(inputs, outputs, compute_dtype=compute, **settings, **options)
        # In evaluation it would repack the weight for another kernel, and keep that in training.
        quantised.support_avx512bf16_for_cpu = False
        quantised.weight = Params4bit(given, requires_grad=False, module=quantised, **settings)
    quantised.bias = layer.bias
    return quantised  # type: ignore[no-any-return]


def _stored(store: Store, layer: Any, transposed: bool, values: torch.Tensor) -> nn.Parameter:
    return store(layer, values.t().contiguous() if transposed else values)


def _store_nf4(layer: Any, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    double = layer.weight.compress_statistics
    weight = Params4bit(
        values, requires_grad=False, compress_statistics=double, quant_type="nf4", module=layer
    )
    return weight._quantize(values.device)  # type: ignore[no-any-return]


def _store_int8(layer: Any, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.nn import Int8Params

    weight = Int8Params(values, requires_grad=False, has_fp16_weights=False)
    layer.weight = weight._quantize(values.device)
    # Otherwise done in the first call, whose compiled code would then fit no other call.
    layer.init_8bit_state()
    return layer.weight  # type: ignore[no-any-return]


def _store_fake_nf4(layer: Any, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit

    double = layer.weight.compress_statistics
    packed, state = quantize_4bit(values, compress_statistics=double, quant_type="nf4")
    weight: Any = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = state
    weight.constants = [state.absmax, state.code]
    # of the layer, which ranks do not divide
    layer.quant_state = state
    layer.constants = weight.constants

    if state.nested:
        weight.constants += [state.offset, state.state2.absmax, state.state2.code]
    return weight  # type: ignore[no-any-return]


def _give_state(layer: Any) -> None:
    """What bitsandbytes does for a weight that ranks have gathered, but for its class."""
    layer.weight.quant_state = layer.quant_state


def _store_fake_int8(layer: Any, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.functional import int8_vectorwise_quant

    rows, scales, _ = int8_vectorwise_quant(values.to(torch.float16))
    weight: Any = nn.Parameter(rows, requires_grad=False)
    weight.CB = rows
    weight.SCB = scales
    weight.constants = [scales]
    return weight  # type: ignore[no-any-return]


def _multiply_rows(setup: Setup, multiply: Callable[..., torch.Tensor]) -> None:
    """Have int8 layers give inputs of more than three dimensions as rows: bitsandbytes' product on
    a card knows matrices and batches of them alone."""
    import bitsandbytes

    def product(inputs: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
        if inputs.dim() <= 3:
            return multiply(inputs, weight, **rest)

        rows = multiply(inputs.flatten(0, -2), weight, **rest)
        return rows.unflatten(0, inputs.shape[:-1])  # type: ignore[no-any-return]

    setup.patch(bitsandbytes, "matmul", product)


def _as_on_cuda(inputs: torch.Tensor, weight: Any, *, bias: Any, state: Any) -> torch.Tensor:
    """bitsandbytes' product dispatches on the device of its inputs; on fake tensors, which are on a
    CPU, it would dequantise."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    return MatMul8bitLt.apply(inputs, weight, None, bias, state)  # type: ignore[no-any-return]


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is the quantised form of a plain layer."""
    return hasattr(module, "stands_for")


def dequantised(layer: Any, dtype: torch.dtype, delta: torch.Tensor | None = None) -> nn.Module:
    """The plain form of a quantised layer, with its dequantised values in `dtype`; `delta`
    [outputs, inputs] is added before they are rounded."""
    from peft.utils.integrations import dequantize_bnb_weight

    values = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None)).float()
    if delta is not None:
        values += delta

    inputs = layer.in_features
    outputs = layer.out_features
    kind = layer.stands_for

    with torch.device("meta"):
        plain: Any = (
            nn.Linear(inputs, outputs) if issubclass(kind, nn.Linear) else kind(outputs, inputs)
        )
    if is_transposed_linear(plain):
        values = values.t()
    plain.weight = nn.Parameter(values.to(dtype).contiguous(), requires_grad=False)
    plain.bias = layer.bias
    return plain.train(layer.training)  # type: ignore[no-any-return]
