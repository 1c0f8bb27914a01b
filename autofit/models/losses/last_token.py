"""What a model gives for the last token of each text, on whichever side texts are padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def at_last_token(by_token: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The values [texts, ...] of the last tokens, of those of all tokens, [texts, tokens, ...].

    Args:
        mask: 1 where a token is text, 0 where it is padding, [texts, tokens]; None: all are text.
    """
    import torch

    if mask is None:
        return by_token[:, -1]
    rows = torch.arange(len(by_token), device=by_token.device)
    places = torch.arange(mask.shape[1], device=mask.device)

    return by_token[rows, (mask * places).argmax(dim=1)]
