"""Decoders with the choices of llm-foundry's MPT, whose speed was published: fused qkv, no biases, learned positions.

Written anew from what its blocks compute; the loss is flash-attn's, which reads the logits once in each direction.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.setup.liger import _kernel

VOCABULARY = 50368


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, size * width, bias=False) for size in (3, 1))
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(samples, length, 3, self.heads, width // self.heads)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # flash-attn's, before cuDNN had its own
            attended = functional.scaled_dot_product_attention(
                *qkv.permute(2, 0, 3, 1, 4), is_causal=True
            )
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return out


class Mpt(nn.Module):
    """A decoder as llm-foundry writes one; embedding and head share their weight."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(VOCABULARY, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class FusedLoss(torch.autograd.Function):
    """One kernel that reads the logits, and one that reads them again and writes their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(len(logits), device=logits.device)
        _kernel(logits, losses)
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        _kernel(logits, gradient)
        return gradient


def mpt_loss(model: Any, batch: Any) -> torch.Tensor:
    """The mean cross-entropy of a batch; nothing is computed."""
    logits = model(batch["tokens"])
    losses: torch.Tensor = FusedLoss.apply(logits.view(-1, logits.shape[-1]))  # type: ignore[no-untyped-call]
    return losses.mean()
