"""quantization: frozen weights in 8 or 4 bits, dequantised where they are used; the heart of QLoRA.

LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339) and NF4 with or without double quantisation of its block scales
(Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes. Layers are exchanged while the model has no weights yet;
then each weight is made, or taken from the living model, and quantised before the next one is: building never holds
the whole model unquantised.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.layers import is_transposed_linear, output_heads

_OUTLIERS = 6.0  # activations beyond it are multiplied unquantised: LLM.int8()'s own threshold, and transformers'
_COMPUTE = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_SMALLEST_NESTED = 64  # elements: one block, whose scale is quantised in its turn
_NO_LINEARS = "the model has no frozen linear layer to quantise; use none."


class Quantization(Technique):
    """`int8`, `nf4`, `nf4-dq` (block scales quantised too: 4.1 bits a weight instead of 4.5) of frozen linear layers.

    The output head, embeddings and norms keep their format, as everywhere. A living model's frozen weights stay
    quantised after training. Checkpointing saves less beside `int8`: bitsandbytes keeps its inputs out of autograd's
    sight, so that they live from the forward to the backward. torchao's NF4 is not used: a step of a linear layer was
    measured 1.7 to 3.3 times slower with it than with bitsandbytes (CPU), and its point is sharding over several ranks.
    """

    name = "quantization"
    stage = Stage.WEIGHTS
    off = "none"
    values = ("none", "int8", "nf4", "nf4-dq")

    def package(self, value: Value) -> str:
        return "torch" if value == self.off else "bitsandbytes"

    def fidelity(self, value: Value) -> int:
        return {"none": 3, "int8": 2, "nf4": 1, "nf4-dq": 0}[str(value)]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value == self.off:
            return None
        if not requirements.installed("bitsandbytes"):
            return f"{value} needs bitsandbytes, which is not installed; pip install bitsandbytes, or use none."
        if not config["lora_rank"]:
            return "quantised weights cannot be trained; set lora_rank, or use none."
        if workload.traits and not workload.traits.linears:
            return _NO_LINEARS
        if config["precision"] == "fp8":
            return "fp8 leaves nothing to multiply in fp8 beside quantised weights; use precision bf16."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        _quantise(setup, value, _hold_int8 if value == "int8" else _hold_nf4)

    def trace(self, setup: Setup, value: Value) -> None:
        """The layers are the real ones; what holds their weights is a plain parameter, for bitsandbytes' own are
        tensor subclasses, and cannot be made of fake tensors."""
        _quantise(setup, value, _hold_fake_int8 if value == "int8" else _hold_fake_nf4)
        _keep_tables_real()
        if value == "int8" and setup.hardware.device == "cuda":
            _multiply_as_on_cuda(setup)


def _quantise(setup: Setup, value: Value, hold: Callable[[Any, bool, torch.Tensor], nn.Parameter]) -> None:
    """Exchange the layers, and say how their weights are to be held."""
    layers = _quantisable(setup.model)
    if not layers:
        raise RefusedError(_NO_LINEARS)
    compute = _COMPUTE.get(str(setup.config["precision"]), torch.float32)
    for parent, name, layer in layers:
        quantised: Any = _int8_layer(layer) if value == "int8" else _nf4_layer(layer, value == "nf4-dq", compute)
        quantised.stands_for = type(layer)  # what `dequantised` makes of it again
        setattr(parent, name, quantised)
        setup.holders[quantised] = functools.partial(hold, quantised, is_transposed_linear(layer))
    # What peft goes by to choose the adapters for layers of this kind.
    flag = "is_loaded_in_8bit" if value == "int8" else "is_loaded_in_4bit"
    model: Any = setup.model
    before = model.__dict__.get(flag)
    setattr(model, flag, True)
    setup.on_close(lambda: setattr(model, flag, before) if before is not None else delattr(model, flag))
    if value == "int8":
        _hush(setup)


def _hush(setup: Setup) -> None:
    """bitsandbytes says at every product, thousands of times a step, that it casts inputs to float16."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    before = logger.level
    logger.setLevel(logging.ERROR)
    setup.on_close(lambda: logger.setLevel(before))


def _quantisable(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of plain linear layers whose weight nobody else holds, the output head left out."""
    heads = output_heads(model)
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found: list[tuple[nn.Module, str, nn.Module]] = []
    parents: dict[nn.Module, int] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            plain = type(child) is nn.Linear or is_transposed_linear(child)
            if plain and child not in heads and holders[id(child.weight)] == 1:
                found.append((parent, name, child))
                parents[child] = parents.get(child, 0) + 1
    return [each for each in found if parents[each[2]] == 1]  # a layer that stands in two places keeps its weight


def _sizes(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    if is_transposed_linear(layer):
        inputs, outputs = layer.weight.shape
        return int(inputs), int(outputs)
    return layer.in_features, layer.out_features


def _nf4_layer(layer: Any, double: bool, compute: torch.dtype) -> nn.Module:
    """The layer that will hold its weight in NF4; it keeps the given parameter until that is quantised."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    quantised = Linear4bit(
        *_sizes(layer),
        bias=layer.bias is not None,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type="nf4",
        device="meta",
    )
    # In evaluation it would repack the weight for another kernel, and go on with it in training.
    quantised.support_avx512bf16_for_cpu = False
    quantised.weight = Params4bit(
        layer.weight.detach(), requires_grad=False, compress_statistics=double, quant_type="nf4", module=quantised
    )
    quantised.bias = layer.bias
    return quantised  # type: ignore[no-any-return]


def _int8_layer(layer: Any) -> nn.Module:
    """The layer that will hold its weight in int8; it keeps the given parameter until that is quantised."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    quantised = Linear8bitLt(
        *_sizes(layer), bias=layer.bias is not None, has_fp16_weights=False, threshold=_OUTLIERS, device="meta"
    )
    quantised.weight = Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
    quantised.bias = layer.bias
    return quantised  # type: ignore[no-any-return]


def _hold_nf4(layer: Any, transposed: bool, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    given = layer.weight
    weight = Params4bit(
        values.t().contiguous() if transposed else values,
        requires_grad=False,
        compress_statistics=given.compress_statistics,
        quant_type=given.quant_type,
        module=layer,
    )
    return weight._quantize(values.device)  # type: ignore[no-any-return]


def _hold_int8(layer: Any, transposed: bool, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.nn import Int8Params

    weight = Int8Params(values.t().contiguous() if transposed else values, requires_grad=False, has_fp16_weights=False)
    layer.weight = weight._quantize(values.device)
    # What the layer else does when it is first called: code compiled for that call would not be that of any other.
    layer.init_8bit_state()
    return layer.weight  # type: ignore[no-any-return]


def _hold_fake_nf4(layer: Any, transposed: bool, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit

    given = layer.weight
    packed, state = quantize_4bit(
        values.t().contiguous() if transposed else values,
        compress_statistics=given.compress_statistics,
        quant_type=given.quant_type,
    )
    weight: Any = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = layer.quant_state = state
    weight.constants = [state.absmax, state.code]
    if state.nested:
        weight.constants += [state.offset, state.state2.absmax, state.state2.code]
    return weight  # type: ignore[no-any-return]


def _hold_fake_int8(layer: Any, transposed: bool, values: torch.Tensor) -> nn.Parameter:
    from bitsandbytes.functional import int8_vectorwise_quant

    rows, scales, _ = int8_vectorwise_quant((values.t().contiguous() if transposed else values).to(torch.float16))
    weight: Any = nn.Parameter(rows, requires_grad=False)
    weight.CB, weight.SCB, weight.constants = rows, scales, [scales]
    return weight  # type: ignore[no-any-return]


def _keep_tables_real() -> None:
    """bitsandbytes makes its tables of values once for good: before there are fake tensors, or they would be fake."""
    from bitsandbytes.functional import quantize_4bit

    quantize_4bit(torch.zeros(_SMALLEST_NESTED), compress_statistics=True, quant_type="nf4")


def _multiply_as_on_cuda(setup: Setup) -> None:
    """bitsandbytes goes by the device of its inputs, and fake tensors are on a CPU: there it would dequantise."""
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    def product(
        inputs: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, state: MatmulLtState
    ) -> torch.Tensor:
        return MatMul8bitLt.apply(inputs, weight, None, bias, state)  # type: ignore[no-any-return]

    before = bitsandbytes.matmul
    bitsandbytes.matmul = product
    setup.on_close(lambda: setattr(bitsandbytes, "matmul", before))


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is a layer that stands for a plain one."""
    return hasattr(module, "stands_for")


def dequantised(layer: Any, dtype: torch.dtype, delta: torch.Tensor | None = None) -> nn.Module:
    """The plain layer that a quantised one stands for, with the values that it computes with.

    Args:
        dtype: of the weight.
        delta: what is added to the values, [outputs, inputs], before they are rounded to it.
    """
    from peft.utils.integrations import dequantize_bnb_weight

    values = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None)).float()
    if delta is not None:
        values += delta
    inputs, outputs, kind = layer.in_features, layer.out_features, layer.stands_for
    with torch.device("meta"):
        plain: Any = kind(inputs, outputs) if kind is nn.Linear else kind(outputs, inputs)
    transposed = is_transposed_linear(plain)
    plain.weight = nn.Parameter((values.t() if transposed else values).to(dtype).contiguous(), requires_grad=False)
    plain.bias = layer.bias
    return plain.train(layer.training)  # type: ignore[no-any-return]
