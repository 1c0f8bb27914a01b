"""Stand-ins for kernels of libraries, which are one operator to a dispatch mode whatever they
allocate inside.

The recorder runs these instead, made of operators that it sees: temporaries are counted where the
device's allocator gives them, and matrix products are booked as such. Kernels that only write their
results need none.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autofit.core.hardware import Hardware

_NESTED_BLOCK = 256  # elements that share a scale of scales, in bitsandbytes
_GROUPED_ROW = 16  # bytes: rows of grouped products begin at a multiple (GroupedMMUtils.h)
_STEPS = 64  # of a sequence, tried at most


def library_kernels(hardware: Hardware) -> dict[str, Callable[..., Any]]:
    """The stand-ins on a device, by the name of the operator; called with its arguments."""
    if hardware.device == "cuda":
        return _KERNELS
    return _KERNELS | _CPU_KERNELS


def notes_of_recurrent(model: nn.Module, hardware: Hardware) -> Iterator[str]:
    """What is taken for granted of recurrent layers on a device, for which cuDNN has no
    stand-in."""
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if hardware.device == "cuda" and is_recurrent:
        yield (
            "recurrent layers were traced step by step: cuDNN's kernels are faster, and keep what "
            "only cuDNN knows."
        )


def _gemm_4bit(
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
    """The weight dequantised, then a plain product."""
    # CUDA also has a fused kernel, for at most 1536 rows (tokens) where it is faster, which depends
    # on card and shape: the larger need is assumed, and a single row is no training.
    operators = torch.ops.bitsandbytes

    if absmax_8bit is not None and absmax_offset is not None:
        absmax = operators.dequantize_blockwise(
            absmax_8bit,
            absmax,
            absmax_code,
            _NESTED_BLOCK,
            torch.float32,
        )
        absmax = absmax + absmax_offset

    values = operators.dequantize_4bit(
        weight,
        absmax,
        blocksize,
        quant_type,
        shape,
        inputs.dtype,
    )

    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(rows, values.t()) if bias is None else torch.addmm(bias, rows, values.t())

    return product.view(*inputs.shape[:-1], shape[0])


def _grouped_mm(
    one: torch.Tensor,
    other: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The products of a mixture's experts.

    PyTorch's own fake takes bfloat16 alone, its kernels any format.
    """
    dims = (one.dim(), other.dim())
    groups: tuple[int, ...] = ()
    if offs is not None and dims == (2, 2):
        groups = offs.shape
    elif dims == (3, 3):
        groups = one.shape[:1]

    rows = one.shape[-2]
    columns = other.shape[-1]
    elements = _GROUPED_ROW // one.itemsize
    row = -(-columns // elements) * elements
    strides = (rows * row, row, 1)[-2 - len(groups) :]

    return one.new_empty_strided(
        (*groups, rows, columns),
        strides,
        dtype=out_dtype,
    )


def _int8_vectorwise_quant(
    inputs: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows scaled to int8. Outliers depend on values; none are assumed."""
    scales = inputs.new_empty(
        inputs.numel() // inputs.shape[-1],
        dtype=torch.float32,
    )
    rows = torch.empty_like(inputs, dtype=torch.int8)
    if not threshold:
        return rows, scales, None

    (inputs.abs() >= threshold).any()

    return rows, scales, inputs.new_empty(0, dtype=torch.int64)


def _int8_mixed_scaled_mm(
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


def _mkldnn_rnn_layer(inputs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """oneDNN's LSTM.

    What it keeps for the backward is larger than its results, and known to the library alone.
    """
    weights = rest[:4]
    hidden, cell = rest[4:6]
    size = rest[9]
    first, training = rest[13:15]
    outputs = (
        inputs.new_empty(*inputs.shape[:-1], size),
        torch.empty_like(hidden),
        torch.empty_like(cell),
    )
    nbytes = 0

    if training:
        given = (
            inputs,
            *weights,
            hidden,
            cell,
        )
        like = tuple((tuple(tensor.shape), tensor.dtype) for tensor in given)

        # Lists cannot be hashed.
        options = tuple(
            tuple(option) if isinstance(option, list) else option for option in rest[6:]
        )
        nbytes = _rnn_workspace(
            like,
            options,
            1 if first else 0,
        )

    return *outputs, inputs.new_empty(nbytes, dtype=torch.uint8)


@functools.lru_cache(maxsize=1024)
def _rnn_workspace(like: tuple[Any, ...], options: tuple[Any, ...], axis: int) -> int:
    """Bytes of the workspace, asked of the library: it grows by as much for each step of the
    sequence."""

    def nbytes(steps: int) -> int:
        (shape, dtype), *others = like
        shape = (*shape[:axis], steps, *shape[axis + 1 :])
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in [(shape, dtype), *others]]
        workspace: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer(*tensors, *options)[-1]

        return workspace.numel()

    steps = like[0][0][axis]
    with _disable_current_modes(), torch.enable_grad():  # without gradients there is none
        if steps <= _STEPS:
            return nbytes(steps)

        half = nbytes(_STEPS // 2)
        whole = nbytes(_STEPS)

    return int(whole + (whole - half) * (steps - _STEPS) // (_STEPS // 2))


def _loss(
    inputs: torch.Tensor,
    _: torch.Tensor,
    *rest: Any,
    reduction: int = 0,
) -> torch.Tensor:
    """PyTorch computes a mean or sum in the storage of the losses of all elements, which the result
    keeps.

    Args:
        reduction: the place of that argument after the target.
    """
    losses = torch.empty_like(inputs)
    is_reduced = len(rest) <= reduction or rest[reduction]

    return losses.as_strided((), ()) if is_reduced else losses


_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_mm,
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    # on a CPU in an evaluation alone
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
}
_KERNELS |= dict.fromkeys(
    ("aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"), _loss
)
_KERNELS["aten::binary_cross_entropy"] = functools.partial(_loss, reduction=1)
_CPU_KERNELS: dict[str, Callable[..., Any]] = {"aten::mkldnn_rnn_layer": _mkldnn_rnn_layer}
