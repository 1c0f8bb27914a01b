"""Losses that read logits token by token, and so need not hold those of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autofit.core.task import IGNORED_LABEL

if TYPE_CHECKING:
    import torch


def by_token(
    function: Callable[..., torch.Tensor],
    logits: Any,
    *others: torch.Tensor,
) -> torch.Tensor:
    """`function(logits, *others)` of each token: [..., tokens].

    With `loss: chunked` only some tokens have logits at a time. A loss of one's own that reads
    logits by this function alone says so by an attribute, `reads_by_token = True`.

    Args:
        function: (logits [tokens, vocabulary], a row of each of `others`) -> [tokens]; what it
            makes of one token depends on that token alone.
        logits: what a model returned, [..., tokens, vocabulary].
        others: what belongs to each token, [..., tokens, ...]; without gradients.
    """
    if hasattr(logits, "by_token"):
        values: torch.Tensor = logits.by_token(function, *others)
        return values

    shape = logits.shape[:-1]
    rows = [tensor.flatten(0, len(shape) - 1) for tensor in (logits, *others)]
    return function(*rows).view(shape)


def next_token_losses(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each token's successor, 0 where that is ignored, [..., tokens].

    Args:
        logits: [..., tokens, vocabulary].
        labels: [..., tokens], -100 where a token is not to be predicted.
    """
    import torch

    successors = torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    return by_token(_cross_entropy, logits, successors)


def _cross_entropy(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(
        logits.float(),
        classes,
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
