"""What several techniques must agree on about a model's layers: which are linear, and which one makes the outputs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from autofit.core.workload import CLASSIFICATION_TASKS, task_of


def is_linear(module: nn.Module) -> bool:
    """A linear layer that is called, also GPT-2's, which holds its weight transposed.

    Not the last layer of an nn.MultiheadAttention, whose weight is read without calling it: what stands in its place
    would not be used.
    """
    return (isinstance(module, nn.Linear) or is_transposed_linear(module)) and not isinstance(
        module, NonDynamicallyQuantizableLinear
    )


def is_transposed_linear(module: nn.Module) -> bool:
    """transformers' Conv1D: weight [in, out] instead of [out, in]. Told by name, to leave transformers unimported."""
    return type(module).__name__ == "Conv1D"


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that makes the outputs: what a transformers model names as such; None for other modules."""
    for name in ("score", "classifier"):  # sequence and image classification
        if hasattr(model, "config") and isinstance(getattr(model, name, None), nn.Linear):
            return getattr(model, name)  # type: ignore[no-any-return]
    get = getattr(model, "get_output_embeddings", None)
    return get() if get else None


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The linear layers that are not of the pretrained body: those that adapters and quantisation leave alone.

    Of a transformers model that classifies, all outside of its base model (RoBERTa's head has two layers, DistilBERT's
    as well): they are new, and random. Of any other, the layer that makes the outputs.
    """
    body = getattr(model, getattr(model, "base_model_prefix", "") or "none", None)
    if task_of(model) in CLASSIFICATION_TASKS and isinstance(body, nn.Module):
        inside = set(body.modules())
        return [module for module in model.modules() if is_linear(module) and module not in inside]
    head = output_head(model)
    return [] if head is None else [head]
