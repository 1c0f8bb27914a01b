"""What the kernels of libraries do inside: to a dispatch mode they are one operator, and what they allocate unseen.

The recorder runs in their place what is given here, made of operators that it does see: temporaries are then counted,
and their matrix products are booked as such. Kernels that only write their results are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from autofit.core.hardware import Hardware

Kernels = dict[str, Callable[..., Any]]

_NESTED_BLOCK = 256  # elements that share a scale of scales, in bitsandbytes


def library_kernels(hardware: Hardware) -> Kernels:
    """By the name of the operator, what stands for it on that device; called with the operator, then its arguments."""
    return _ON_CUDA if hardware.device == "cuda" else _ON_CPU


def _quantize_4bit_on_cpu(
    operator: Any, values: torch.Tensor, blocksize: int, quant_type: str, storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32: scaled, clamped, compared with the table (int32), packed two to a byte."""
    flat = values.reshape(-1).float()
    blocks = _padded(flat, blocksize).view(-1, blocksize)
    scales = blocks.abs().max(dim=-1)[0]
    scaled = torch.clamp(blocks * scales.reciprocal().view(-1, 1), -1, 1).reshape(-1)[: flat.numel()]
    places = torch.empty_like(scaled, dtype=torch.int32)
    codes = _padded(places.to(torch.uint8), 2)
    return (codes[::2].bitwise_left_shift(4) | codes[1::2]).unsqueeze(1), scales


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Values filled up to a multiple; the same tensor where there is nothing to fill."""
    missing = -values.numel() % multiple
    return functional.pad(values, (0, missing)) if missing else values


def _int8_vectorwise_quant_on_cpu(
    operator: Any, values: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """As weights are quantised, without a threshold for outliers: in a training on a CPU nothing else is."""
    scales = values.abs().max(dim=1).values.float()
    return torch.round(values * (127.0 / scales.unsqueeze(-1))).to(torch.int8), scales, None


def _gemm_4bit(
    operator: Any,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight dequantised, then a plain product.

    CUDA has a fused kernel too, for at most 1536 rows (tokens) where it is faster, which depends on card and shape: the
    larger need is taken, and a single row is no training.
    """
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None and absmax_offset is not None:
        absmax = operators.dequantize_blockwise(absmax_8bit, absmax, absmax_code, _NESTED_BLOCK, torch.float32)
        absmax = absmax + absmax_offset
    values = operators.dequantize_4bit(weight, absmax, blocksize, quant_type, shape, inputs.dtype)
    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(rows, values.t()) if bias is None else torch.addmm(bias, rows, values.t())
    return product.view(*inputs.shape[:-1], shape[0])


def _int8_vectorwise_quant(
    operator: Any, inputs: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows scaled to int8. Whether there are outliers only values can tell; none are assumed."""
    scales = inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)
    rows = torch.empty_like(inputs, dtype=torch.int8)
    if not threshold:
        return rows, scales, None
    (inputs.abs() >= threshold).any()
    return rows, scales, inputs.new_empty(0, dtype=torch.int64)


def _int8_mixed_scaled_mm(
    operator: Any,
    inputs: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without outliers: an int32 product, scaled to fp16, then cast."""
    none = inputs.new_empty(0)
    product = torch._int_mm(rows, weight.t())
    out = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(inputs.dtype), none


_ON_CPU: Kernels = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::quantize_4bit": _quantize_4bit_on_cpu,
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant_on_cpu,
}
_ON_CUDA: Kernels = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
}
