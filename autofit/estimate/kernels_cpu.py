"""What the kernels of a CPU hold inside a call: no operator returns it, so fake tensors do not show it.

Convolutions go through oneDNN, which computes in blocks of 16 channels: what enters a call and what leaves it exist a
second time in that order (ATen, native/mkldnn/Conv.cpp; oneDNN, "Understanding memory formats"). The gradient of a
weight is summed in fp32 by every group of threads that shares the batch, and in bf16 from features of one image,
transposed so that pairs of pixels lie together (oneDNN, `init_scratchpad` and `balance` of its AVX-512 kernels).

Which layout is chosen when follows no published rule: that was read off the allocator's events on a grid of shapes, on
a processor with AVX-512, and tests/estimate/test_kernels_cpu.py compares it with real calls of other shapes. Buffers of
some kilobytes that threads have for themselves are left out, and so are tensors that lie channels last, kernels wider
than 14 pixels (their forward needs less) and transposed convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

_BLOCK = 16  # channels: the fp32 lanes of an AVX-512 register
# Of matrix products in bf16: the largest tile, in elements, and what PyTorch computes itself.
_TILE_ROWS, _TILE_COLUMNS, _TILE_DEPTH, _SUMMED_COLUMNS = 256, 64, 512, 1024
_TOO_SMALL = 16**3  # native/mkldnn/Matmul.cpp, use_mkldnn_bf16_matmul
_IMAGE = 3  # channels up to which fp32 reads an input as it lies for the gradient of the weight, too


def bytes_inside(func: Any, args: Sequence[Any], result: Any) -> int:
    """The most that lives inside a call at once, beside its results; 0 for operators without a rule."""
    rule = _RULES.get(func._schema.name)
    if rule is not None:
        returned = sum(each.nbytes for each in tree_iter(result) if isinstance(each, torch.Tensor))
        return max(0, rule(*args) - returned)
    return _promoted(args, in_place=func._schema.is_mutable) if torch.Tag.pointwise in func.tags else 0


@dataclass(frozen=True)
class _Convolution:
    """A convolution of tensors that lie as they are indexed; `sizes` are those of the output's image."""

    inputs: torch.Tensor
    weight: torch.Tensor
    sizes: tuple[int, ...]
    stride: int
    padding: int
    groups: int

    @property
    def itemsize(self) -> int:
        return self.inputs.itemsize

    @property
    def low(self) -> bool:
        return self.itemsize < 4

    @property
    def batch(self) -> int:
        return self.inputs.shape[0]

    @property
    def entering(self) -> int:
        """Channels."""
        return self.weight.shape[1] * self.groups

    @property
    def leaving(self) -> int:
        """Channels."""
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        """Elements."""
        return self.batch * self.leaving * math.prod(self.sizes)

    @property
    def kernel(self) -> int:
        """Elements between one channel and another."""
        return math.prod(self.weight.shape[2:])

    @property
    def depthwise(self) -> bool:
        return self.groups == self.entering > 1

    @property
    def wide(self) -> bool:
        """Enough channels enter to be put in blocks for the forward."""
        return self.groups > 1 or self.entering >= _BLOCK

    @property
    def blocked_inputs(self) -> int:
        return self.inputs.numel() // self.entering * _padded(self.entering)

    @property
    def blocked_outputs(self) -> int:
        return self.outputs // self.leaving * _padded(self.leaving)

    @property
    def narrow_weight(self) -> int:
        """Elements of the weight where the channels that enter are taken as they lie."""
        if self.wide:
            return self.blocked_weight
        return _padded(self.leaving) * self.entering * self.kernel

    @property
    def blocked_weight(self) -> int:
        if self.groups > 1:
            return self.weight.numel()
        return _padded(self.leaving) * _padded(self.entering) * self.kernel

    def forward(self) -> int:
        """Bytes at once."""
        taken = self.blocked_inputs if self.wide else 0
        scratch = 0
        if self.kernel == 1 and self.wide:
            each = 4 * self.blocked_outputs if self.low else 0
            scratch = _threads() * (each + self._gathered()) // self.batch
        weight = self.narrow_weight
        if self.low and not self.wide:  # channels in pairs
            weight = weight // self.entering * _even(self.entering)
        reading = (taken + weight + self.blocked_outputs) * self.itemsize + scratch
        return max(reading, (self.blocked_outputs + self.outputs) * self.itemsize)

    def _gathered(self) -> int:
        """Bytes of the pixels that a pointwise kernel with a stride takes."""
        if self.kernel > 1 or self.stride == 1:
            return 0
        return self.blocked_outputs // _padded(self.leaving) * _padded(self.entering) * self.itemsize

    def gradient_of_input(self) -> int:
        """Bytes at once."""
        reading = (self.blocked_outputs + self.blocked_weight + self.blocked_inputs) * self.itemsize
        if self.kernel == 1 and self.low and self.stride == 1:
            reading += _threads() * self.blocked_inputs // self.batch * 4
        # With a stride the result comes channels last, and is put in order by a further copy.
        copies = 2 if self.stride > 1 and not (self.depthwise and not self.low) else 1
        return max(reading, (self.blocked_inputs + copies * self.inputs.numel()) * self.itemsize)

    def gradient_of_weight(self) -> int:
        """Bytes at once."""
        if self.groups > 1 and not self.depthwise and self.weight.shape[1] < _BLOCK:
            return self.weight.numel() * (self.itemsize + 4)  # by matrix products, with nothing in blocks
        weight = self.narrow_weight
        reading = (self.blocked_outputs + weight + self._taken()) * self.itemsize
        summed, transposed = self._sums()
        reading += summed * weight * 4 + transposed * self.itemsize
        return max(reading + _threads() * self._gathered() // self.batch, 2 * weight * self.itemsize)

    def _taken(self) -> int:
        """Elements of the input's copy; of few channels fp32 takes blocks of 8."""
        if self.wide:
            return self.blocked_inputs
        if self.low or self.entering <= _IMAGE:
            return 0
        return self.inputs.numel() // self.entering * -(-self.entering // 8) * 8

    def _sums(self) -> tuple[int, int]:
        """How many weights are summed beside the one that is returned, and how many elements are transposed."""
        if self.depthwise:
            return int(self.low), 0
        if self.kernel == 1 or not self.low:
            sharing = self._sharing(self.blocked_inputs / self.stride**2, self.blocked_outputs, (1, 1, 8))
            return sharing if self.low else sharing - 1, 0
        coming, going = self._transposed()
        scale = (coming + going) / (4 * self.narrow_weight)
        ratio = self._blocks[1] / self._blocks[0]
        costs = (max(int(1 / ratio), 1) * (4 if scale < 1 else 1), max(int(ratio), 1), max(int(scale), 1))
        sharing = self._sharing(coming / self.stride**2, going, costs)
        return sharing, sharing * ((coming if self.wide else 0) + going) // self.batch

    def _transposed(self) -> tuple[int, int]:
        """Elements that enter and leave, with rows of an even length and room for the padding."""
        width, out = self.inputs.shape[-1], self.sizes[-1]
        room = _even(max(self.padding, (out - 1) * self.stride + self.weight.shape[-1] - width - self.padding + 1))
        row = _even(-(-width // self.stride) + room) * self.stride if self.wide else width
        coming = self.blocked_inputs if self.wide else self.inputs.numel()
        return coming // width * row, self.blocked_outputs // out * _even(out)

    @property
    def _blocks(self) -> tuple[int, int]:
        """Of channels that enter and leave one group."""
        entering, leaving = (-(-each // self.groups // _BLOCK) for each in (self.entering, self.leaving))
        return entering, leaving

    def _sharing(self, coming: float, going: float, costs: tuple[int, int, int]) -> int:
        """How many groups of threads share the batch, each with sums of its own, while the others share channels:
        the division with the least to be read and written by a thread, as oneDNN weighs it."""
        threads = _threads() // self.groups
        best = math.inf
        chosen = 1
        for sharing in range(1, threads + 1):
            for leaving in range(1, min(threads // sharing, self._blocks[1]) + 1):
                entering = min(threads // sharing // leaving, self._blocks[0])
                outward = _share(self._blocks[1], leaving)
                inward = _share(self._blocks[0], entering)
                features = costs[0] * coming * inward + costs[1] * going * outward
                cost = features / sharing + costs[2] * self.narrow_weight * inward * outward
                if cost <= best:
                    best, chosen = cost, sharing
        return threads if threads // 2 < chosen < threads else chosen


def _threads() -> int:
    return torch.get_num_threads()


def _share(blocks: int, parties: int) -> float:
    return -(-blocks // parties) / blocks


def _padded(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _even(length: int) -> int:
    return length + length % 2


def _chosen(args: Sequence[Any]) -> tuple[str, _Convolution]:
    """The backend of a call by PyTorch's own choice, in which a bias plays no part, and the call."""
    inputs, weight, stride, padding, dilation, transposed, output_padding, groups = args
    backend = torch._C._select_conv_backend(
        inputs, weight, None, stride, padding, dilation, transposed, output_padding, groups, None
    )
    sizes = tuple(
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, pad, gap, kernel, step in zip(
            inputs.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    )
    return backend.name, _Convolution(inputs, weight, sizes, max(stride), padding[-1], groups)


def _forward(inputs: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None, *rest: Any) -> int:
    backend, call = _chosen((inputs, weight, *rest))
    if backend == "Slow2d":
        return (_columns(call) + call.outputs) * call.itemsize
    return call.forward() if backend == "Mkldnn" and inputs.is_contiguous() else 0


def _backward(_: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, __: Any, *rest: Any) -> int:
    *described, wanted = rest
    backend, call = _chosen((inputs, weight, *described))
    returned = inputs.numel() * call.itemsize if wanted[0] else 0
    if backend == "Slow2d":
        return returned + (weight.numel() + _columns(call)) * call.itemsize
    if backend != "Mkldnn" or not inputs.is_contiguous():
        return 0
    first = call.gradient_of_input() if wanted[0] else 0
    return max(first, returned + (call.gradient_of_weight() if wanted[1] else 0))


def _columns(call: _Convolution) -> int:
    """Elements that ATen's own convolution copies for its matrix product (native/ConvolutionMM2d.cpp)."""
    if call.kernel == 1 and call.stride == 1:
        return 0
    return call.outputs // call.leaving * call.entering * call.kernel


def _product(first: torch.Tensor, second: torch.Tensor, *_: Any) -> int:
    """A matrix product in bf16, by oneDNN: threads copy what they multiply and sum in fp32, tile by tile. The bounds of
    the tiles were read off as those of convolutions."""
    rows, summed, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    returned = first.numel() // summed * columns * first.itemsize
    if first.dtype != torch.bfloat16 or rows * summed * columns <= _TOO_SMALL or not _onednn_takes_bf16():
        return returned
    tiles = -(-rows // _TILE_ROWS)
    tall = -(-rows // (-(-tiles // _threads()) * _threads()))
    wide = min(columns, _TILE_COLUMNS)
    deep = min(-(-summed // 32) * 32, _TILE_DEPTH)
    if first.stride(-1) == 1:
        copied = wide * (deep if summed <= 2 * _TILE_DEPTH else 2 * _TILE_DEPTH)
        return returned + _threads() * (copied * 2 + min(rows, _TILE_ROWS) * wide * 4)
    if summed > _TILE_DEPTH:  # of a matrix that lies transposed, all columns are summed at once
        wide = min(columns, _SUMMED_COLUMNS)
    return returned + _threads() * (deep * (tall + min(columns, _TILE_COLUMNS)) * 2 + tall * wide * 4)


@functools.cache
def _onednn_takes_bf16() -> bool:
    """Without AVX-512 PyTorch multiplies itself (native/mkldnn/Utils.h, mkldnn_bf16_device_check)."""
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def _product_and_sum(_: torch.Tensor, *factors: Any) -> int:
    return _product(*factors)


def _attention(query: torch.Tensor, key: torch.Tensor, *_: Any) -> int:
    """Each thread's tile of scores, sums and outputs, in fp32 and the scores in a lower format too
    (native/cpu/FlashAttentionKernel.cpp); the packed copies that only processors with AMX make are left out."""
    rows, scores = _tile(query, key)
    lower = query.itemsize * scores if query.itemsize < 4 else 0
    each = 4 * (scores + 2 * rows + rows * query.shape[-1]) + lower
    returned = query.numel() * query.itemsize + query.numel() // query.shape[-1] * 4
    return returned + _threads() * each


def _attention_backward(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any) -> int:
    """The same tile of scores and of their gradients."""
    _, scores = _tile(query, key)
    each = 2 * scores * (4 + (query.itemsize if query.itemsize < 4 else 0))
    return sum(tensor.nbytes for tensor in (query, key, value)) + _threads() * each


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows, and rows times columns."""
    length = query.shape[-2]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    return rows, rows * min(key.shape[-2], 512)


def _promoted(args: Sequence[Any], *, in_place: bool) -> int:
    """Operands of another format than they are computed in exist in that one too, and so does a result that goes back
    into one of them (TensorIterator.cpp, compute_types; on CUDA kernels convert as they read)."""
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dim() and each.is_floating_point()]
    formats = {each.dtype for each in tensors}
    if len(formats) < 2:
        return 0
    common = functools.reduce(torch.promote_types, formats)
    copied = [each for each in tensors if each.dtype != common]
    if in_place and tensors[0].dtype != common:
        copied.append(tensors[0])
    return sum(each.numel() for each in copied) * common.itemsize


def _mean(inputs: torch.Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Of a low format: input and result exist in fp32 too (native/ReduceOps.cpp, mean)."""
    over = dims or range(inputs.dim())
    returned = inputs.numel() // max(1, math.prod(inputs.shape[each] for each in over))
    if inputs.dtype not in (torch.bfloat16, torch.float16):
        return returned * inputs.itemsize
    return returned * (inputs.itemsize + 4) + inputs.numel() * 4


def _step_in_8_bits(_: str, gradient: torch.Tensor, weight: torch.Tensor, *__: Any) -> int:
    """bitsandbytes' own CPU step of AdamW computes in fp32: both moments, the gradient times its scale, the root of the
    second moment before and after its correction; and a weight that is not fp32 (backends/cpu/ops.py)."""
    copies = 5 if weight.dtype == torch.float32 else 6
    return copies * 4 * gradient.numel()


# What lives inside at most, the results included.
_RULES: dict[str, Callable[..., int]] = {
    "aten::convolution": _forward,
    "aten::convolution_backward": _backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mean": _mean,
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product_and_sum,
    "aten::baddbmm": _product_and_sum,
    "bitsandbytes::optimizer_update_8bit_blockwise": _step_in_8_bits,
}
