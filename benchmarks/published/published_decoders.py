"""Decoders with the choices of litgpt, whose memory was published: fused qkv, adapters inside, logits held in chunks.

Written anew from what model.py, lora.py and utils.py of litgpt (0.4 and lit-gpt 8641822) save for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.published_layers import Adapters, FourBitLinear, RmsNorm, Shape

CHUNK = 128  # tokens whose logits and loss are computed at once
Linear = Callable[..., nn.Module]


def linears(shape: Shape, quantisation: str) -> Linear:
    """What makes the linear layers of a model: plain ones, or in 4 bits (`nf4`, `nf4-dq`)."""
    if quantisation == "none":
        return nn.Linear
    return partial(FourBitLinear, double=quantisation == "nf4-dq")


class _AdaptedLinear(nn.Module):
    """A linear layer with an adapter beside it, which sees the input through a dropout."""

    def __init__(
        self, make: Linear, sizes: tuple[int, int], bias: bool, adapters: Adapters
    ) -> None:
        super().__init__()
        self.linear = make(*sizes, bias=bias)
        self.lora_a = nn.Parameter(torch.zeros(adapters.rank, sizes[0]))
        self.lora_b = nn.Parameter(torch.zeros(sizes[1], adapters.rank))
        self.dropout = nn.Dropout(adapters.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = (self.dropout(x) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)) * 2.0
        out: torch.Tensor = self.linear(x) + update
        return out


class _AdaptedQkv(nn.Module):
    """The fused query, key and value product; updates of those that have an adapter are spread over its width."""

    def __init__(self, make: Linear, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        widths = {"query": shape.heads, "key": shape.groups, "value": shape.groups}
        self.widths = [count * shape.head for name, count in widths.items() if name in adapters.on]
        self.width = (shape.heads + 2 * shape.groups) * shape.head
        self.partial = len(self.widths) < len(widths)
        self.even = shape.heads == shape.groups
        self.linear = make(shape.hidden, self.width, bias=shape.bias)
        self.lora_a = nn.Parameter(torch.zeros(adapters.rank * len(self.widths), shape.hidden))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.widths), adapters.rank))
        self.dropout = nn.Dropout(adapters.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        low = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        update = self._upwards(low).transpose(-2, -1)
        return out + (self._spread(update) if self.partial else update) * 2.0  # type: ignore[no-any-return]

    def _upwards(self, low: torch.Tensor) -> torch.Tensor:
        kernel = self.lora_b.unsqueeze(-1)
        if self.even:
            return functional.conv1d(low, kernel, groups=len(self.widths))
        pairs = zip(low.chunk(len(self.widths), dim=1), kernel.split(self.widths), strict=True)
        return torch.cat([functional.conv1d(part, weight) for part, weight in pairs], dim=1)

    def _spread(self, update: torch.Tensor) -> torch.Tensor:
        update = update.transpose(0, 1)
        zeros = update.new_zeros((*update.shape[:-1], self.width)).view(-1, self.width)
        places = torch.arange(sum(self.widths), device=update.device)
        spread = zeros.index_copy(1, places, update.reshape(-1, sum(self.widths)))
        return spread.view((*update.shape[:-1], self.width)).transpose(0, 1)


class _Attention(nn.Module):
    def __init__(self, make: Linear, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        self.shape = shape
        adapted = adapters.on & {"query", "key", "value"}
        width = (shape.heads + 2 * shape.groups) * shape.head
        self.qkv = (
            _AdaptedQkv(make, shape, adapters)
            if adapted
            else make(shape.hidden, width, bias=shape.bias)
        )
        self.projection = _linear(
            make, (shape.hidden, shape.hidden), shape.bias, adapters, "projection"
        )

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        shape, each = self.shape, self.shape.heads // self.shape.groups
        qkv = (
            self.qkv(x)
            .view(samples, length, shape.groups, each + 2, shape.head)
            .permute(0, 2, 3, 1, 4)
        )
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if each > 1:
            k, v = (part.expand(samples, shape.groups, each, length, shape.head) for part in (k, v))
        q, k, v = (part.reshape(samples, -1, length, shape.head) for part in (q, k, v))
        q, k = (_rotated(part, cosines, sines) for part in (q, k))
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.0, scale=shape.head**-0.5, is_causal=True
        )
        out: torch.Tensor = self.projection(
            y.transpose(1, 2).reshape(samples, length, shape.hidden)
        )
        return out


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the first features of a head; the others are copied beside them."""
    size = cosines.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    half = size // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    roped = (turned * cosines + swapped * sines).to(x.dtype)
    return torch.cat((roped, rest), dim=-1)


class _Mlp(nn.Module):
    def __init__(self, make: Linear, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        up = (shape.hidden, shape.inner)
        self.first = _linear(make, up, shape.bias, adapters, "mlp")
        self.gate = _linear(make, up, shape.bias, adapters, "mlp") if shape.gated else None
        self.last = _linear(make, up[::-1], shape.bias, adapters, "mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            out: torch.Tensor = self.last(functional.gelu(self.first(x)))
        else:
            first, gate = self.first(x), self.gate(x)
            out = self.last(functional.silu(first) * gate)
        return out


def _linear(
    make: Linear, sizes: tuple[int, int], bias: bool, adapters: Adapters, name: str
) -> nn.Module:
    return (
        _AdaptedLinear(make, sizes, bias, adapters)
        if name in adapters.on
        else make(*sizes, bias=bias)
    )


class _Block(nn.Module):
    def __init__(self, make: Linear, shape: Shape, adapters: Adapters) -> None:
        super().__init__()
        self.norm_1 = _norm(shape)
        self.attention = _Attention(make, shape, adapters)
        self.norm_2 = None if shape.shared_norm else _norm(shape)
        self.mlp = _Mlp(make, shape, adapters)
        self.parallel = shape.parallel

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        attended = self.attention(normed, cosines, sines)
        if self.parallel:
            out: torch.Tensor = self.mlp(self.norm_2(x) if self.norm_2 else normed) + attended + x
            return out
        x = attended + x
        assert self.norm_2 is not None, "only parallel blocks share a norm"
        return self.mlp(self.norm_2(x)) + x  # type: ignore[no-any-return]


def _norm(shape: Shape) -> nn.Module:
    return RmsNorm(shape.hidden) if shape.norm == "rms" else nn.LayerNorm(shape.hidden)


class FusedDecoder(nn.Module):
    """A decoder as litgpt writes one; with adapters, all else is frozen, and logits come in chunks of tokens.

    `logits` are what the published training loop holds on to until the next micro-batch has its own.
    """

    def __init__(
        self, shape: Shape, adapters: Adapters, quantisation: str, length: int, *, follows: bool
    ) -> None:
        super().__init__()
        make = linears(shape, quantisation)
        self.head = _linear(
            make, (shape.hidden, shape.vocabulary), shape.head_bias, adapters, "head"
        )
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(_Block(make, shape, adapters) for _ in range(shape.layers))
        self.norm = _norm(shape)
        rotary = int(shape.rotary * shape.head)
        self.register_buffer("cosines", torch.zeros(length, rotary, device="cpu"))
        self.register_buffer("sines", torch.zeros(length, rotary, device="cpu"))
        self.adapted = adapters.rank > 0
        self.logits: Any = None
        self.follows = follows
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(
                not self.adapted or "lora_" in name
            ) if parameter.is_floating_point() else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        x = self.norm(x)
        if self.adapted:
            return [self.head(part) for part in x.split(CHUNK, dim=1)]
        return self.head(x)  # type: ignore[no-any-return]


def fused_loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy over chunks of 128 tokens, as the published loop computes it.

    The loop holds on to the logits, and with them to the nodes of the graph, until the next micro-batch has its own:
    `model.follows` says that the traced one comes after another of the same size.
    """
    if model.follows:
        model.follows = False
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return _loss(model, batch)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    """Lightning Fabric hands on in fp32 what a bf16 model returns, before the loop lets go of the earlier logits."""
    logits, targets = model(batch["tokens"]), batch["labels"][..., 1:]
    if model.adapted:
        logits = [chunk.float() for chunk in logits]
        model.logits = logits
        logits[-1] = logits[-1][..., :-1, :]
        return _mean(
            [each.reshape(-1, each.size(-1)) for each in logits], targets.split(CHUNK, dim=1)
        )
    model.logits = logits = logits.float()
    flat = logits[..., :-1, :].reshape(-1, logits.size(-1))
    return _mean(flat.split(CHUNK), targets.reshape(-1).split(CHUNK))


def _mean(logits: Any, targets: Any) -> torch.Tensor:
    pairs = zip(logits, targets, strict=True)
    losses = [
        functional.cross_entropy(each, target.reshape(-1), reduction="none")
        for each, target in pairs
    ]
    return torch.cat(losses).mean()
