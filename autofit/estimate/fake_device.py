"""The world that a config is traced in: tensors without storage, on a device that behaves as the target would.

Tensors are fake CPU tensors whatever the target is, because a build of PyTorch without CUDA cannot differentiate fake
CUDA ones (it ends the process). What CUDA would do otherwise is put in its place: the choice of the attention kernel,
and the operators that CUDA's autocast computes in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autofit.core.hardware import Hardware

_AMPERE = (8, 0)
_HOPPER = (9, 0)
_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024  # bytes: ":4096:2:16:8", parseChosenWorkspaceSize
_HOPPER_WORKSPACE = 8 * 4096 * 1024
_FLASH_HEAD = 256  # largest head size of PyTorch's flash kernel: sdp_utils.cpp, check_head_dim_size_flash
_CUDNN_FIRST = (9, 10)  # major capabilities on which PyTorch prefers cuDNN's
_CUDNN_HEAD, _CUDNN_HEADS = 128, (192, 128)  # largest head size, and the one pair (of keys, of values) beyond it
_LITTLE_SHARED_MEMORY = (
    (8, 6),
    (8, 9),
    (12, 0),
)  # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
_EFFICIENT_ALIGNMENT = 16  # bytes of a row that the efficient kernel reads at once

_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, bool]  # query, key, value, dropout, whether grouped


@contextmanager
def fake_world(hardware: Hardware) -> Iterator[FakeTensorMode]:
    """Inside, tensors that are made are fake; real ones that meet them are taken for fakes of their shape."""
    with ExitStack() as stack:
        masks: Any = sys.modules.get("transformers.masking_utils")
        if masks is not None:
            # transformers takes fake tensors for the sign of an export, and would make masks that a run does not have.
            stack.enter_context(mock.patch.object(masks, "is_tracing", lambda *_, **__: False))
        if hardware.device == "cuda":
            attention = _cuda_attention(hardware, functional.scaled_dot_product_attention)
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
            stack.enter_context(mock.patch.object(functional, "dropout", _cuda_dropout(functional.dropout)))
            for name in ("is_autocast_enabled", "get_autocast_dtype"):
                stack.enter_context(mock.patch.object(torch, name, _of_the_cpu(getattr(torch, name))))
            for name in ("softmax", "layer_norm", "log_softmax", "cross_entropy", "nll_loss", "group_norm", "mse_loss"):
                stack.enter_context(mock.patch.object(functional, name, _in_fp32(getattr(functional, name))))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def workspace_bytes(hardware: Hardware) -> int:
    """What cuBLAS holds in PyTorch's allocator from the first backward on (CUDABlas' CublasHandlePool.cpp).

    Handles are per thread, and each has a workspace: one for the forward, one for the thread of the backward.
    """
    if hardware.device != "cuda":
        return 0
    hopper = hardware.capability is not None and hardware.capability >= _HOPPER
    return 2 * (_HOPPER_WORKSPACE if hopper else _WORKSPACE)


def _of_the_cpu(question: Callable[[str], Any]) -> Callable[..., Any]:
    """Whoever asks about CUDA's autocast (peft does, to cast its inputs or leave that to autocast) means this one."""
    return lambda device="cuda": question("cpu" if device == "cuda" else device)


def _cuda_dropout(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """CUDA keeps one byte for each element, a CPU a factor in the input's format (Dropout.cpp, dropout)."""

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        fused = training and not inplace and 0 < p < 1 and input.numel() > 0
        return torch.native_dropout(input, p, True)[0] if fused else plain(input, p, training, inplace)

    return dropout


def _in_fp32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What CUDA's autocast computes in fp32 and the CPU's does not (torch/amp: "CUDA Ops that can autocast to
    float32")."""

    def widened(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and input.is_floating_point():
            input = input.float()
            args = tuple(each.float() if _is_low(each) else each for each in args)
            kwargs = {name: each.float() if _is_low(each) else each for name, each in kwargs.items()}
        return function(input, *args, **kwargs)

    return widened


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cuda_attention(hardware: Hardware, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch's fused attention, by the kernel that it would choose on that card (sdp_utils.cpp)."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):  # what autocast does before the choice is made
            low = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(low), key.to(low), value.to(low)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        inputs = (query, key, value, dropout_p, grouped)
        if _cudnn(inputs, hardware):
            return _by_cudnn(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if _flash(inputs, attn_mask, is_causal, hardware):
            return _by_flash(query, key, value, dropout_p, is_causal, scale)
        if _efficient(inputs, hardware):
            return _by_efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")  # word for word PyTorch's
        plainly: Any = torch.ops.aten._scaled_dot_product_attention_math.default
        out: torch.Tensor = plainly(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out

    return attention


def _cudnn(inputs: _Inputs, hardware: Hardware) -> bool:
    """can_use_cudnn_attention, with masks and groups too; check_prefer_cudnn_attention says where it comes first."""
    query, key, value, dropout, _ = inputs
    preferred = hardware.capability is not None and hardware.capability[0] in _CUDNN_FIRST
    sizes = query.shape[-1], value.shape[-1]
    known = not any(size % 8 for size in sizes) and (max(sizes) <= _CUDNN_HEAD or sizes == _CUDNN_HEADS)
    long = key.shape[-2] > 1 and (query.shape[-2] > 1 or not dropout)
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    low = query.dtype in (torch.float16, torch.bfloat16)
    return allowed and preferred and low and known and long and _plain(inputs)


def _flash(inputs: _Inputs, mask: torch.Tensor | None, is_causal: bool, hardware: Hardware) -> bool:
    """can_use_flash_attention: half precision on Ampere and later, one head size up to 256, no mask."""
    query, key, value, dropout, _ = inputs
    size = query.shape[-1]
    ampere = hardware.capability is None or hardware.capability >= _AMPERE
    low = query.dtype in (torch.float16, torch.bfloat16)
    one_size = size == key.shape[-1] == value.shape[-1] and size <= _FLASH_HEAD
    square = not is_causal or query.shape[-2] == key.shape[-2]
    small_card = hardware.capability in _LITTLE_SHARED_MEMORY and torch.is_grad_enabled()
    too_large = small_card and (192 < size <= 224 or (size > 224 and dropout > 0))
    allowed = torch.backends.cuda.flash_sdp_enabled() and mask is None and not too_large
    return allowed and ampere and low and one_size and square and _plain(inputs)


def _efficient(inputs: _Inputs, hardware: Hardware) -> bool:
    """can_use_mem_efficient_attention: rows that are whole 16 bytes (minimum_gemm_alignment), no groups."""
    query, key, value, _, grouped = inputs
    ampere = hardware.capability is None or hardware.capability >= _AMPERE
    half = query.dtype is torch.float16
    known = half or query.dtype is torch.float32 or (ampere and query.dtype is torch.bfloat16)
    elements = _EFFICIENT_ALIGNMENT // query.itemsize if ampere or half else 1
    aligned = query.shape[-1] % elements == 0 and value.shape[-1] % elements == 0
    allowed = torch.backends.cuda.mem_efficient_sdp_enabled() and query.shape[-1] == key.shape[-1]
    return allowed and known and aligned and not grouped and _plain(inputs)


def _plain(inputs: _Inputs) -> bool:
    """What both kernels ask of tensors: batch, heads, length and size, the last without gaps, and none of them 0."""
    tensors = inputs[:3]
    return all(each.dim() == 4 and each.stride(-1) == 1 and each.numel() > 0 for each in tensors)


def _by_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """What it keeps for the backward; its workspace, which only cuDNN knows and only on a card, is left out."""
    cudnn: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    bias = _bias(mask, query, key)
    out: torch.Tensor = cudnn(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, False, scale=scale
    )[0]
    return out


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores: 0, and minus infinity where a mask says so."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _by_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    size = query.shape[-1]
    padding = -size % 8  # the kernel takes head sizes in steps of 8: sdp_utils, pad_last_dim
    if padding:
        query, key, value = (functional.pad(each, (0, padding)) for each in (query, key, value))
        scale = scale or size**-0.5
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :size] if padding else out


def _by_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = _bias(mask, query, key)
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out: torch.Tensor = efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[
        0
    ]
    return out
