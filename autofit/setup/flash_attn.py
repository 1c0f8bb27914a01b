"""Stand-in for flash-attn's kernels in a traced step: they are built for CUDA, and may not be
installed.

transformers passes its implementation `flash_attention_2` a window and, for padded batches, which
tokens count; no mask is made. flash-attn saves for the backward what PyTorch's own copy of its
kernels saves (queries, keys, values, the output and a number per row), so PyTorch's stands for it.
A window makes it faster, and takes no memory.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.errors import RefusedError
from autofit.setup.state import Setup

IMPLEMENTATION = "flash_attention_2"


def stand_in_for_flash_attn(setup: Setup) -> None:
    """Make a transformers model call the stand-in wherever it would call flash-attn.

    Raises:
        ValueError: where the model has no such implementation.
    """
    model: Any = setup.model
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    implementations = modeling.AttentionInterface._global_mapping
    plain = implementations[IMPLEMENTATION]
    before = model.config._attn_implementation

    implementations[IMPLEMENTATION] = _attention
    setup.on_close(lambda: implementations.update({IMPLEMENTATION: plain}))
    _set(model, IMPLEMENTATION, _checked)
    setup.on_close(lambda: model.set_attn_implementation(before))


def put_back(model: Any, implementation: str) -> None:
    """Make a model call again what it called before, which may be the stand-in."""
    _set(model, implementation, lambda _, implementation, **__: implementation)


def _set(model: Any, implementation: str, checked: Callable[..., str]) -> None:
    """Set the implementation, checked by `checked`: not for whether the package is installed."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    with contextlib.ExitStack() as stack:
        # of the model, and of those within it, such as what sees in a model of images and text
        for check in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
            stack.enter_context(mock.patch.object(modeling.PreTrainedModel, check, checked))
        model.set_attn_implementation(implementation)


def _checked(model: Any, implementation: str, **_: Any) -> str:
    compatible = getattr(model, "_compatible_flash_implementations", None)
    is_compatible = compatible is None or implementation in compatible
    if not model._supports_flash_attn or not is_compatible:
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
    """Like transformers' flash_attention_forward: takes (batch, heads, length, size), returns
    (batch, length, heads, size)."""
    batch, heads, length, size = query.shape
    value_size = value.shape[-1]
    integration: Any = importlib.import_module("transformers.integrations.flash_attention")
    target = integration.get_target_dtype(query, module)
    if value_size != size:
        value = functional.pad(value, (0, size - value_size))
    if target is not None:
        query, key, value = (tensor.to(target) for tensor in (query, key, value))

    tokens = length
    # padded batches: the same number of tokens, in samples of one length
    if attention_mask is not None:
        tokens = -(-int(attention_mask.sum()) // batch)
        # Copies, laid out as a projection leaves them.
        query, key, value = (
            tensor.transpose(1, 2)[:, :tokens].contiguous().transpose(1, 2)
            for tensor in (query, key, value)
        )

    if is_causal is None:
        is_causal = module.is_causal

    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scaling,
                enable_gqa=heads != key.shape[1],
            )
    except RuntimeError as error:
        raise RefusedError(
            "flash-attn's kernel does not support this model's attention; use sdpa."
        ) from error

    out = out.transpose(1, 2)
    if attention_mask is not None:
        out = functional.pad(out, (0, 0, 0, 0, 0, length - tokens))
    if value_size != size:
        out = out[..., :value_size]
    return out, None
