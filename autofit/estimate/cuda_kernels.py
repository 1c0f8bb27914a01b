"""What PyTorch takes on a card, and a trace must take instead: its kernel of attention, by the
rules of sdp_utils.cpp, and the memory that cuBLAS works in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from autofit.core.hardware import Hardware

_AMPERE = (8, 0)
_HOPPER = (9, 0)

# Bytes of a workspace of cuBLAS: ":4096:2:16:8", parseChosenWorkspaceSize of CublasHandlePool.cpp.
_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER_WORKSPACE = 8 * 4096 * 1024

_FLASH_HEAD = 256  # the largest head size of PyTorch's flash kernel: check_head_dim_size_flash
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0))

_CUDNN_FIRST = (9, 10)  # major capabilities on which PyTorch prefers cuDNN's kernel
_CUDNN_HEAD = 128  # its largest head size
_CUDNN_HEADS = (192, 128)  # the one pair, of keys and of values, beyond it

_EFFICIENT_ALIGNMENT = 16  # bytes of a row that the efficient kernel reads at once


def kernels_of(hardware: Hardware) -> tuple[bool, ...]:
    """What of a card its traces depend on; cards of which it is the same share them."""
    return (
        _of_ampere(hardware),
        _of_hopper(hardware),
        _prefers_cudnn(hardware),
        hardware.capability in _LITTLE_SHARED_MEMORY,
    )


def workspace_bytes(hardware: Hardware) -> int:
    """What cuBLAS holds in PyTorch's allocator from the first backward on (CublasHandlePool.cpp).

    Handles are per thread, and each has a workspace: one for the forward, one for the thread of the
    backward.
    """
    if hardware.device != "cuda":
        return 0

    nbytes = _HOPPER_WORKSPACE if _of_hopper(hardware) else _WORKSPACE

    return 2 * nbytes


def _of_ampere(hardware: Hardware) -> bool:
    """Whether it is of this generation or a later one, as a card that is not known is."""
    return hardware.capability is None or hardware.capability >= _AMPERE


def _of_hopper(hardware: Hardware) -> bool:
    return hardware.capability is not None and hardware.capability >= _HOPPER


def _prefers_cudnn(hardware: Hardware) -> bool:
    return hardware.capability is not None and hardware.capability[0] in _CUDNN_FIRST


def cuda_attention(
    hardware: Hardware, plain: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """PyTorch's fused attention, by the kernel that it chooses on that card (sdp_utils.cpp).

    Args:
        plain: `scaled_dot_product_attention`, whose arguments it takes.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):  # it casts before the choice is made
            low = torch.get_autocast_dtype("cpu")
            query = query.to(low)
            key = key.to(low)
            value = value.to(low)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)

        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        call = _Attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            grouped,
        )

        for takes, compute in _KERNELS:
            if takes(call, hardware):
                return compute(call)

        if not torch.backends.cuda.math_sdp_enabled():
            # word for word PyTorch's
            raise RuntimeError("No available kernel. Aborting execution.")

        math: Any = torch.ops.aten._scaled_dot_product_attention_math.default

        return math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]

    return attention


class _Attention(NamedTuple):
    """The arguments of one call.

    Attributes:
        query, key, value: (batch, heads, length, size).
        mask: what is added to the scores, or where they count; None: everywhere.
        dropout: the share of the scores that is dropped.
        is_causal: whether tokens see those before them alone.
        scale: of the scores; None: one by the root of the size.
        grouped: whether several heads of queries share one of keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def regular(self) -> bool:
        """What all fused kernels need: four axes, of which the last is contiguous and none is 0."""
        for tensor in (self.query, self.key, self.value):
            if tensor.dim() != 4 or tensor.stride(-1) != 1 or tensor.numel() == 0:
                return False

        return True

    @property
    def half(self) -> bool:
        """Whether it is computed in 16 bits."""
        return self.query.dtype in (torch.float16, torch.bfloat16)

    def with_bias(self) -> tuple[Any, ...]:
        """The arguments of kernels that add a mask to the scores, and keep sums for a backward."""
        saves = torch.is_grad_enabled()
        tensors = (
            self.query,
            self.key,
            self.value,
            self._bias(),
        )

        return *tensors, saves, self.dropout, self.is_causal

    def _bias(self) -> torch.Tensor | None:
        """What is added to the scores: 0, and minus infinity where a mask says so."""
        mask = self.mask
        if mask is None:
            return None

        if mask.dtype is torch.bool:
            hidden = mask.logical_not()
            mask = torch.zeros_like(mask, dtype=self.query.dtype)
            mask.masked_fill_(hidden, float("-inf"))

        batch, heads, length, _ = self.query.shape

        return mask.expand(
            batch,
            heads,
            length,
            self.key.shape[2],
        )


def _takes_cudnn(call: _Attention, hardware: Hardware) -> bool:
    """can_use_cudnn_attention, with masks and groups too; check_prefer_cudnn_attention says where
    it comes first."""
    if not torch.backends.cuda.cudnn_sdp_enabled() or not _prefers_cudnn(hardware):
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False

    sizes = (call.query.shape[-1], call.value.shape[-1])
    supported = max(sizes) <= _CUDNN_HEAD or sizes == _CUDNN_HEADS
    if sizes[0] % 8 or sizes[1] % 8 or not supported:
        return False

    several_keys = call.key.shape[-2] > 1
    several_queries = call.query.shape[-2] > 1
    long = several_keys and (several_queries or not call.dropout)

    return long and call.half and call.regular


def _takes_flash(call: _Attention, hardware: Hardware) -> bool:
    """can_use_flash_attention: half precision on Ampere and later, one head size up to 256, no
    mask."""
    if not torch.backends.cuda.flash_sdp_enabled() or not _of_ampere(hardware):
        return False
    if call.mask is not None or not call.half or not call.regular:
        return False

    size = call.query.shape[-1]
    if size > _FLASH_HEAD or size != call.key.shape[-1] or size != call.value.shape[-1]:
        return False

    small_card = hardware.capability in _LITTLE_SHARED_MEMORY and torch.is_grad_enabled()
    too_large = 192 < size <= 224 or (size > 224 and call.dropout > 0)
    if small_card and too_large:
        return False

    square = call.query.shape[-2] == call.key.shape[-2]
    return square or not call.is_causal


def _takes_efficient(call: _Attention, hardware: Hardware) -> bool:
    """can_use_mem_efficient_attention: rows that are whole 16 bytes (minimum_gemm_alignment), no
    groups."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if call.grouped or not call.regular or call.query.shape[-1] != call.key.shape[-1]:
        return False

    formats = [torch.float16, torch.float32]
    if _of_ampere(hardware):
        formats.append(torch.bfloat16)
    if call.query.dtype not in formats:
        return False

    elements = 1
    if _of_ampere(hardware) or call.query.dtype is torch.float16:
        elements = _EFFICIENT_ALIGNMENT // call.query.itemsize

    return call.query.shape[-1] % elements == 0 and call.value.shape[-1] % elements == 0


def _by_cudnn(call: _Attention) -> Any:
    """What it saves for the backward; its workspace, known to cuDNN alone and on a card only, is
    left out."""
    cudnn: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return cudnn(*call.with_bias(), False, scale=call.scale)[0]


def _by_flash(call: _Attention) -> Any:
    """The kernel takes head sizes in steps of 8; others are padded (sdp_utils, pad_last_dim)."""
    query, key, value, _, dropout, is_causal, scale, _ = call
    size = query.shape[-1]
    padding = -size % 8
    if padding:
        query = functional.pad(query, (0, padding))
        key = functional.pad(key, (0, padding))
        value = functional.pad(value, (0, padding))
        scale = scale or size**-0.5

    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    out = flash(query, key, value, dropout, is_causal, False, scale=scale)[0]
    if padding:
        out = out[..., :size]

    return out


def _by_efficient(call: _Attention) -> Any:
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return efficient(*call.with_bias(), scale=call.scale)[0]


# PyTorch takes the first of them that it can.
_KERNELS = (
    (_takes_cudnn, _by_cudnn),
    (_takes_flash, _by_flash),
    (_takes_efficient, _by_efficient),
)
