"""What preference losses share: the log-probability of answers, and where the reference's are from.

A batch holds pairs side by side: `input_ids`, `attention_mask` and `labels` are
[pairs, 2, tokens], the better text first; labels are -100 but where the answer is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError
from autofit.core.task import IGNORED_LABEL
from autofit.core.workload import REFERENCE
from autofit.models.losses.by_token import next_token_losses

if TYPE_CHECKING:
    import torch

_OF_TEXTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_OF_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes")


def answer_log_probabilities(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The log-probability of each answer, given its prompt: the sum over its tokens, [pairs, 2].

    Or [samples, 1] of batches of one text each.
    """
    logits = model(**inputs_of(batch)).logits
    losses = next_token_losses(logits, batch["labels"].flatten(0, 1))

    return -losses.sum(dim=1).view(batch["labels"].shape[:2])


def answer_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """The tokens of each answer, [pairs, 2]; at least 1."""
    counts: torch.Tensor = (batch["labels"][:, :, 1:] != IGNORED_LABEL).sum(dim=2)
    return counts.clamp(min=1)


def reference_log_probabilities(
    models: Mapping[str, Any], batch: Mapping[str, Any]
) -> torch.Tensor:
    """What the model said before training, [pairs, 2]: asked now, or with the batch.

    Raises:
        InputError: the batch does not hold it, and there is no such model.
    """
    import torch

    if REFERENCE in models:
        with torch.no_grad():
            return answer_log_probabilities(models[REFERENCE], batch)

    if REFERENCE not in batch:
        message = (
            f'the batches lack "{REFERENCE}", the log-probabilities before training, [pairs, 2].'
        )
        raise InputError(message, "Set reference to resident, or to adapter-off with lora_rank.")

    log_probabilities: torch.Tensor = batch[REFERENCE]

    return log_probabilities


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward takes of a batch: all texts one below the other, and so their images; the
    patches of all images are one tensor where a grid says how many each has."""
    found = {name: batch[name].flatten(0, 1) for name in input_names(batch)}
    if "image_grid_thw" in found:
        found["pixel_values"] = found["pixel_values"].flatten(0, 1)

    return found


def input_names(batch: Mapping[str, Any]) -> list[str]:
    """What of a batch a forward takes."""
    return [name for name in (*_OF_TEXTS, *_OF_IMAGES) if name in batch]
