"""What stands for flash-attn's kernels where a training step is traced: they are made for CUDA, and need not be here.

transformers hands its implementation `flash_attention_2` a window and, of padded batches, which tokens count; no mask
is ever made. flash-attn keeps for the backward what PyTorch's own copy of its kernels keeps (queries, keys, values,
the output and a number for each row), so that one stands for it. A window makes it faster, and takes no memory.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.errors import RefusedError
from autofit.setup.state import Setup

IMPLEMENTATION = "flash_attention_2"


def stand_in_for_flash_attn(setup: Setup) -> None:
    """Have a transformers model call the stand-in wherever it would call flash-attn.

    Raises:
        ValueError: the model has no such implementation.
    """
    model: Any = setup.model
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    known = modeling.AttentionInterface._global_mapping
    plain, before = known[IMPLEMENTATION], model.config._attn_implementation
    known[IMPLEMENTATION] = _attention
    setup.on_close(lambda: known.update({IMPLEMENTATION: plain}))
    # Whether the package is installed is not asked.
    with mock.patch.object(modeling.PreTrainedModel, "_check_and_adjust_attn_implementation", _checked):
        model.set_attn_implementation(IMPLEMENTATION)
    setup.on_close(lambda: model.set_attn_implementation(before))


def _checked(model: Any, implementation: str, **_: Any) -> str:
    compatible = getattr(model, "_compatible_flash_implementations", None)
    if not model._supports_flash_attn or (compatible is not None and implementation not in compatible):
        raise ValueError(f"{type(model).__name__} does not support it")
    return implementation


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' flash_attention_forward: of tensors (batch, heads, length, size), one (batch, length, heads,
    size)."""
    (batch, heads, length, size), of_values = query.shape, value.shape[-1]
    target = importlib.import_module("transformers.integrations.flash_attention").get_target_dtype(query, module)
    if of_values != size:
        value = functional.pad(value, (0, size - of_values))
    if target is not None:
        query, key, value = (each.to(target) for each in (query, key, value))
    kept = length
    if attention_mask is not None:  # of padded batches: as many tokens, in samples that are all of one length
        kept = -(-int(attention_mask.sum()) // batch)
        query, key, value = (_first(each, kept) for each in (query, key, value))
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=module.is_causal if is_causal is None else is_causal,
                scale=scaling,
                enable_gqa=heads != key.shape[1],
            )
    except RuntimeError as error:
        raise RefusedError("flash-attn's kernel does not take this model's attention; use sdpa.") from error
    out = out.transpose(1, 2)
    if attention_mask is not None:
        out = functional.pad(out, (0, 0, 0, 0, 0, length - kept))
    return out if of_values == size else out[..., :of_values], None


def _first(tensor: torch.Tensor, kept: int) -> torch.Tensor:
    """A copy of the first tokens of each sample, laid out as a projection leaves them."""
    return tensor.transpose(1, 2)[:, :kept].contiguous().transpose(1, 2)
