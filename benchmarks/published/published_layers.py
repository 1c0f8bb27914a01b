"""Layers of the training libraries whose memory was published, where they keep other tensors than Hugging Face's.

Written anew from what the published code saves for the backward: nothing here computes anything useful, but every
operator that keeps, makes or casts a tensor is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import bitsandbytes  # noqa: F401 -- registers the operators of its formats
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

# weights that share a scale, and scales that share one: QLoRA, arXiv 2305.14314
BLOCK, NESTED = (64, 256)


@dataclass(frozen=True)
class Shape:
    """The architecture of a decoder, as published_models.yaml gives it."""

    layers: int
    hidden: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    positions: int
    rotary: float = 1.0
    norm: str = "rms"
    gated: bool = True
    bias: bool = False
    head_bias: bool = False
    parallel: bool = False
    shared_norm: bool = False
    tied: bool = False

    @property
    def head(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Adapters:
    """LoRA as a row describes it: rank (0: all weights are trained), dropout, and the layers that have one."""

    rank: int = 0
    dropout: float = 0.0
    on: frozenset[str] = frozenset()


class RmsNorm(nn.Module):
    """Root-mean-square norm in fp32, operator by operator (litgpt 0.4 and torchtune; before, litgpt multiplied by the
    weight in fp32 too, which keeps the same as long as the weight is frozen)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class _FourBitProduct(torch.autograd.Function):
    """A product with a weight in NF4, as bitsandbytes computed it up to 0.43: the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        # not by save_for_backward, so that it lives as long as the graph does
        ctx.layer, ctx.kept = (layer, x)
        return functional.linear(x, layer.dequantised().to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.matmul(gradients[0], ctx.layer.dequantised().to(gradients[0].dtype)), None


class FourBitLinear(nn.Module):
    """A frozen linear layer in NF4, its block scales in fp32 or, `double`, in 8 bits with scales of their own.

    bitsandbytes dequantises to the format that was quantised, and Lightning Fabric quantises from fp16 whatever the
    weights were published in (bitsandbytes.py, _Linear4bit.quantize).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, double: bool) -> None:
        super().__init__()
        self._shape = (outputs, inputs)
        blocks = inputs * outputs // BLOCK
        self.packed = _bytes(inputs * outputs // 2)
        # As bytes: the precision of a config is for numbers that are not of a quantised format.
        self.scales = _bytes(blocks if double else 4 * blocks)
        self.outer_scales = _bytes(4 * -(-blocks // NESTED) if double else 0)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    def dequantised(self) -> torch.Tensor:
        scales = (
            self.scales.float() + 1.0
            if self.outer_scales.numel()
            else self.scales.view(torch.float32)
        )
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            self.packed.view(-1, 1), scales, BLOCK, "nf4", self._shape, torch.float16
        )
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FourBitProduct.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]


def _bytes(count: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dtype=torch.uint8, device="meta"), requires_grad=False)


class OffloadedActivations(saved_tensors_hooks):
    """What is saved goes to the host, as torchtune does it: the last five tensors stay until newer ones push them out
    or the backward begins, and what comes back stays until the next node runs.

    Of the host's copies nothing is made here: on fake tensors they would count as the device's.
    """

    def __init__(self, model: nn.Module, *, stashed: int = 5, smallest: int = 1024) -> None:
        self._own = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._stashed, self._smallest = stashed, smallest
        self._stash: dict[int, torch.Tensor] = {}
        self._count = 0
        self._back: list[torch.Tensor] = []
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < self._smallest or id(tensor) in self._own:
            return tensor
        self._count += 1
        self._stash[self._count] = tensor.detach()
        self._stash.pop(self._count - self._stashed, None)
        return self._count, tensor.shape, tensor.stride(), tensor.dtype

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        number, shape, strides, dtype = packed
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._back = node, []
        tensor = self._stash.get(number)
        self._stash = {}
        if tensor is None:
            tensor = torch.empty_strided(shape, strides, dtype=dtype)
        self._back.append(tensor)
        return tensor


class _Nf4Product(torch.autograd.Function):
    """A product with a weight in torchao's NF4: the weight is dequantised again in the backward, the input not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, sizes: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.sizes = sizes
        return functional.linear(x, _nf4_weight(packed, scales, sizes))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (
            torch.matmul(gradients[0], _nf4_weight(*ctx.saved_tensors, ctx.sizes)),
            None,
            None,
            None,
        )


def _nf4_weight(packed: torch.Tensor, scales: torch.Tensor, sizes: Any) -> torch.Tensor:
    weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1), scales.float() + 1.0, BLOCK, "nf4", sizes, torch.bfloat16
    )
    return weight


class Nf4Linear(nn.Module):
    """A frozen linear layer in torchao's NF4: 8-bit block scales, and an fp32 scale for 256 of those."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._sizes = (outputs, inputs)
        self.packed = _bytes(inputs * outputs // 2)
        self.scales = _bytes(inputs * outputs // BLOCK)
        self.outer_scales = _bytes(4 * inputs * outputs // BLOCK // NESTED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nf4Product.apply(x, self.packed, self.scales, self._sizes)  # type: ignore[no-untyped-call, no-any-return]
