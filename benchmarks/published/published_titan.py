"""Llama as torchtitan writes it, whose memory was published: what its checkpointing saves, and its losses.

Written anew from parallelize_llama.py, model.py and train.py of torchtitan in December 2024 (9dec370) and June 2025.
Float8 has fp32 weights and saves what bf16 does: torchao's layers are products of wrapped tensors, whose results the
policy saves as any other product's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from benchmarks.published_layers import RmsNorm, Shape
from benchmarks.published_memory import on_meta, shape_of
from benchmarks.published_mpt import FusedLoss
from benchmarks.published_runs import context_of, length_of, random_tokens, run_of

_PRODUCT = torch.ops.aten.mm.default
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
# The products of a block are q, k, v, out, gate, up, down. A compiler keeps of the saved ones what the backward reads:
# not the last.
_SAVED, _SAVED_COMPILED = (1, 3, 5, 7), (1, 3, 5)


class _Products:
    """The policy of `op` (_get_custom_policy): save attention and every second product of a block, from the first."""

    def __init__(self, saved: tuple[int, ...]) -> None:
        self._saved, self._seen = saved, {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator is _ATTENTION
        if operator is _PRODUCT:
            self._seen[context.is_recompute] += 1
            saved = self._seen[context.is_recompute] in self._saved
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class _Block(nn.Module):
    def __init__(self, shape: Shape, saved: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.saved = shape, saved
        self.norm_1, self.norm_2 = RmsNorm(shape.hidden), RmsNorm(shape.hidden)
        narrow = shape.groups * shape.head
        self.q, self.out = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        contexts: Callable[[], Any] = lambda: create_selective_checkpoint_contexts(  # noqa: E731
            _Products(self.saved)
        )
        chosen = {"context_fn": contexts} if self.saved else {}
        out: torch.Tensor = checkpoint(
            self._run, x, table, use_reentrant=False, preserve_rng_state=False, **chosen
        )
        return out

    def _run(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            part(normed).view(*x.shape[:2], -1, self.shape.head)
            for part in (self.q, self.k, self.v)
        )
        q, k = _rotated(q, table), _rotated(k, table)
        k, v = (
            part.repeat_interleave(self.shape.heads // self.shape.groups, dim=2) for part in (k, v)
        )
        # PyTorch's choice on Hopper at the end of 2024
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            parts = (part.transpose(1, 2) for part in (q, k, v))
            attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        normed = self.norm_2(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * table[: x.shape[1], None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class TitanLlama(nn.Module):
    """A decoder whose blocks save attention and these of their products, counted from 1; without any, their inputs.
    Embedding, last norm and head are one group of weights."""

    def __init__(self, shape: Shape, length: int, saved: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.register_buffer("table", torch.zeros(length, shape.head // 2, dtype=torch.complex64))
        self.blocks = nn.ModuleList(_Block(shape, saved) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def titan_loss(model: Any, batch: Any, *, compiled: bool) -> torch.Tensor:
    """Cross-entropy in fp32; `compiled`: by kernels that read the logits as they are."""
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(0, 1)
    if compiled:
        losses: torch.Tensor = FusedLoss.apply(logits)  # type: ignore[no-untyped-call]
        return losses.mean()
    return functional.cross_entropy(logits.float(), labels)


def titan_run(row: dict[str, str]) -> tuple[Workload, Config, Hardware]:
    """A row of torchtitan. Weights are divided among all cards, those of a context group too, and tokens within it."""
    _, given, hardware = run_of(row)
    compiled, length = row["compile"] == "yes", length_of(row) // context_of(row)
    saved = () if row["checkpointing"] == "full" else _SAVED_COMPILED if compiled else _SAVED
    # The loss was compiled, too, when the runs of June 2025 were made (torchtitan/components/loss.py).
    loss = partial(titan_loss, compiled=compiled and "torch 2.8" in row["versions"])
    micro = int(row["micro_batch"])
    workload = Workload(
        model=partial(on_meta, partial(TitanLlama, shape_of(row["model"]), length, saved)),
        batch=partial(random_tokens, length),
        loss=loss,
        effective_batch_size=micro * hardware.world,
        unit="tokens",
        sequence_length=length,
    )
    config = Config(
        precision="bf16-mixed",
        micro_batch_size=micro,
        optimizer=given["optimizer"],
        data_parallel="fsdp",
    )
    return workload, config, hardware
