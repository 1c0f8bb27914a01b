"""How long texts are that are padded on the right, and batches cut to their longest text."""

from collections.abc import Mapping
from typing import Any

import torch

from autofit.data.batch import Cut, has_rows, labels_of

_COLUMNS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "labels",
)  # [samples, ..., tokens]


def text_lengths(batch: Any, cut: Cut | None = None) -> torch.Tensor | None:
    """The tokens of each sample's longest text up to its padding, [samples].

    None where no mask on the host tells them, or all are as long.
    """
    mask = labels_of(batch, "attention_mask")
    if not isinstance(batch, Mapping) or mask is None or mask.dim() < 2:
        return None
    if not has_rows(batch, cut):
        return None
    if mask.device.type != "cpu":  # to ask a card would wait for it
        return None

    width = mask.shape[-1]
    counts = torch.arange(1, width + 1)
    ends = (mask != 0) * counts
    lengths = ends.flatten(1).amax(dim=1)
    if bool((lengths == width).all()):
        return None
    return lengths


def cut_to(batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The batch with so many tokens of each text."""
    width = batch["attention_mask"].shape[-1]
    cut = dict(batch)
    for name in _COLUMNS:
        value = batch.get(name)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        if value.shape[-1] == width:
            cut[name] = value[..., :tokens]

    return cut
