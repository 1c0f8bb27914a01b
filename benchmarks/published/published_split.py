"""Decoders with the choices of torchtune, whose memory was published: separate products, shared rotary table.

Written anew from what transformer.py, attention.py, lora.py and the recipes of torchtune (November 2024) save for the
backward. Compiled layers are compiled in four parts, because the attention of packed samples is kept out of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.compiled_parts import Compiled
from benchmarks.published_layers import Adapters, Nf4Linear, OffloadedActivations, RmsNorm, Shape

CHUNKS = 8  # of the sequence, for logits and loss: CEWithChunkedOutputLoss
Run = Callable[..., Any]


class _AdaptedLinear(nn.Module):
    def __init__(self, sizes: tuple[int, int], rank: int, *, quantised: bool) -> None:
        super().__init__()
        self.base = Nf4Linear(*sizes) if quantised else nn.Linear(*sizes, bias=False)
        self.lora_a = nn.Linear(sizes[0], rank, bias=False)
        self.lora_b = nn.Linear(rank, sizes[1], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 2.0 * self.lora_b(self.lora_a(x))
        return out


def _linear(sizes: tuple[int, int], name: str, adapters: Adapters, quantised: bool) -> nn.Module:
    if name in adapters.on:
        return _AdaptedLinear(sizes, adapters.rank, quantised=quantised)
    return Nf4Linear(*sizes) if quantised else nn.Linear(*sizes, bias=False)


class _Projections(nn.Module):
    """Query, key and value with rotary positions, keys and values repeated for every head."""

    def __init__(self, shape: Shape, adapters: Adapters, quantised: bool) -> None:
        super().__init__()
        self.shape = shape
        narrow = shape.groups * shape.head
        self.q = _linear((shape.hidden, shape.hidden), "q", adapters, quantised)
        self.k = _linear((shape.hidden, narrow), "k", adapters, quantised)
        self.v = _linear((shape.hidden, narrow), "v", adapters, quantised)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        shape, (samples, length, _) = self.shape, x.shape
        q = _rotated(self.q(x).view(samples, length, shape.heads, shape.head), table, positions)
        k = _rotated(self.k(x).view(samples, length, shape.groups, shape.head), table, positions)
        v = self.v(x).view(samples, length, shape.groups, shape.head)
        k, v = (self._repeated(part) for part in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, groups, size = x.shape
        wide = x.unsqueeze(3).expand(samples, length, groups, self.shape.heads // groups, size)
        return wide.reshape(samples, length, self.shape.heads, size)


def _rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring features, in fp32, by the rows of the table that belong to the packed positions."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turn = table[positions].view(-1, pairs.size(1), 1, pairs.size(3), 2)
    first = pairs[..., 0] * turn[..., 0] - pairs[..., 1] * turn[..., 1]
    second = pairs[..., 1] * turn[..., 0] + pairs[..., 0] * turn[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class _Output(nn.Module):
    def __init__(self, shape: Shape, adapters: Adapters, quantised: bool) -> None:
        super().__init__()
        self.projection = _linear((shape.hidden, shape.hidden), "o", adapters, quantised)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.projection(x.transpose(1, 2).contiguous().flatten(2))
        return out


class _FeedForward(nn.Module):
    """The rest of a layer: the sum with what entered it, and the gated feed-forward network."""

    def __init__(self, shape: Shape, adapters: Adapters, quantised: bool) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden)
        self.gate = _linear((shape.hidden, shape.inner), "mlp", adapters, quantised)
        self.up = _linear((shape.hidden, shape.inner), "mlp", adapters, quantised)
        self.down = _linear((shape.inner, shape.hidden), "mlp", adapters, quantised)

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = attended + x
        normed = self.norm(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: Shape, adapters: Adapters, quantised: bool, run: Run) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden)
        self.projections = _Projections(shape, adapters, quantised)
        self.output = _Output(shape, adapters, quantised)
        self.feed_forward = _FeedForward(shape, adapters, quantised)
        self.run = run

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.run(self.projections, self.run(self.norm, x), table, positions)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.run(self.feed_forward, x, self.run(self.output, attended))
        return out


class _CrossEntropy(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def _plainly(module: nn.Module, *arguments: torch.Tensor) -> Any:
    return module(*arguments)


class SplitDecoder(nn.Module):
    """A decoder as torchtune writes one; with adapters, all else is frozen.

    Args:
        compiled: whether its layers and the loss are.
        chunked: whether logits and loss come in chunks of the sequence.
        offloaded: whether what the layers save, all but the head's, waits on the host.
    """

    def __init__(
        self,
        shape: Shape,
        adapters: Adapters,
        quantised: bool,
        *,
        compiled: bool,
        chunked: bool,
        offloaded: bool,
    ) -> None:
        super().__init__()
        self.offloaded = offloaded
        self.run: Run = Compiled() if compiled else _plainly
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(
            _Layer(shape, adapters, quantised, self.run) for _ in range(shape.layers)
        )
        self.norm = RmsNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer(
            "table", torch.zeros(shape.positions, shape.head // 2, 2, device="cpu")
        )
        self.chunks = CHUNKS if chunked else 0
        self.loss = _CrossEntropy()
        for name, parameter in self.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(not adapters.rank or "lora_" in name)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | list[torch.Tensor]:
        with OffloadedActivations(self) if self.offloaded else nullcontext():
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, self.table, positions)
            x = self.norm(x)
        if self.chunks:
            return [self.head(part) for part in x.tensor_split(self.chunks, dim=1)]
        return self.head(x).float()  # type: ignore[no-any-return]


def split_loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy of shifted labels, with nothing of the logits held by the loop."""
    labels = functional.pad(batch["labels"][..., 1:], (0, 1), value=-100)
    logits = model(batch["tokens"], batch["positions"])
    parts = logits if model.chunks else [logits]
    targets = labels.tensor_split(len(parts), dim=1)
    flat = [each.reshape(-1, each.size(-1)) for each in parts]
    del logits, parts
    total = torch.zeros((), device=labels.device)
    for each, target in zip(flat, targets, strict=True):
        total = total + model.run(model.loss, each, target.reshape(-1))
    return total / (labels != -100).sum()
