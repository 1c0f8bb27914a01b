"""Runs of Hugging Face's Trainer on FSDP1, whose memory was published: where they keep more than autofit's own runs.

Written anew from transformers 4.45, torch 2.4 and fms-acceleration's kernels, which those runs had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import sharding
from autofit.setup.layers import repeated_blocks
from autofit.setup.liger import _kernel
from benchmarks.published_runs import run_of

# Its code computes the loss in the format of the logits, all others of the rows in fp32.
_BIGCODE = "gpt_bigcode"


class _Kept(torch.autograd.Function):
    """The input of a frozen block and its gradient, which stay until the backward is over.

    A checkpointed block of transformers 4.45 is recomputed from a detached copy of its input, in which its gradient is
    accumulated (torch/utils/checkpoint.py, CheckpointFunction). FSDP1 reshards a block without trained weights by a
    hook on that copy (_runtime_utils.py, _register_post_backward_reshard_only_hook), and lets go of its hooks, which
    hold the copy, when the whole backward is over (_finalize_params). Seen in a small model, too: with frozen weights
    inputs and gradients of all blocks lived at the end of a backward, without none did.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x)
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.kept.append(gradients[0])
        return gradients[0], None


class _InPlace(torch.autograd.Function):
    """unsloth's cross-entropy: the gradient is written over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(len(logits), device=logits.device)
        _kernel(logits, losses)
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0]


def one_root() -> Any:
    """A context in which embedding and head belong to the root: accelerate wraps blocks (TRANSFORMER_BASED_WRAP), and
    FSDP1 keeps its root gathered from the forward to the end of the backward (_post_forward_reshard)."""
    return mock.patch.object(sharding, "_large_ends", lambda setup: ())


def trainer_run(row: dict[str, str]) -> tuple[Workload, Config, Hardware]:
    """A row of fms-acceleration, whose full runs have their peak in the update, when nothing of this is alive."""
    workload, config, hardware = run_of(row)
    model = partial(_with_cache if "bigcode" in row["model"] else _without_gates, workload.model)
    if row["lora_r"]:  # lora_dropout of scenarios*.yaml
        model, config = partial(_frozen, model), Config(**{**config, "lora_dropout": 0.1})
    fused = row["fused_loss"].startswith("Liger")
    ways = {"in_place": "foak" in row["fused_loss"], "mixed": row["autocast"] != "none"}
    loss = None if fused else partial(_shifted_loss, **ways)
    return replace(workload, model=model, loss=loss), config, hardware


def _without_gates(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose gated activations no kernel replaces: those of fms-acceleration are of norms, rotations and losses
    (fms_acceleration_foak/models)."""
    model = make()
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            module.__class__ = type("Feedforward", (type(module),), {})
    return model


def _with_cache(make: Callable[[], nn.Module]) -> nn.Module:
    """A GPTBigCode whose keys and values stay until the loss is known, because its cache is not turned off beside
    checkpointing: they are views of their joint product with the queries (modeling_gpt_bigcode.py). That of a 4-bit
    layer has the format of its input, fp32 from autocast's layer norm (bitsandbytes, Linear4bit.forward)."""
    model: Any = make()
    hooked: list[Any] = []

    def keep(module: Any, _: Any, out: torch.Tensor) -> None:
        if model.cached is not None:
            model.cached.append(out.detach() if type(module) is nn.Linear else out.detach().float())

    def hook(*_: Any) -> None:  # once adapters are there
        if not hooked:
            products = (
                module for name, module in model.named_modules() if name.endswith("attn.c_attn")
            )
            hooked.extend(product.register_forward_hook(keep) for product in products)

    model.register_forward_pre_hook(hook)
    return model  # type: ignore[no-any-return]


def _frozen(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of which adapters alone will be trained."""
    model = make()
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return (_Kept.apply(given[0], kept), *given[1:]), named  # type: ignore[no-untyped-call]

    model.register_forward_pre_hook(lambda *_: kept.clear())
    for block in repeated_blocks(model):
        block.register_forward_pre_hook(keep, with_kwargs=True)
    return model


def _shifted_loss(model: Any, batch: Any, *, in_place: bool, mixed: bool) -> torch.Tensor:
    """Cross-entropy of logits whose last position is cut away by a copy. `mixed`: under autocast; accelerate then hands
    on in fp32 what a model returns (convert_outputs_to_fp32)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    model.cached = []
    logits = model(**inputs).logits
    if model.config.model_type != _BIGCODE:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    if in_place:
        losses: torch.Tensor = _InPlace.apply(shifted)  # type: ignore[no-untyped-call]
        loss = losses.mean()
    else:
        loss = functional.cross_entropy(shifted, batch["labels"][..., 1:].reshape(-1))
    if mixed:
        logits = logits.float()
    model.cached = None
    return loss
