"""Whether packed samples see one another in a model.

It is tried: what is before a sample in its row is changed, and the sample's own loss must not
change. transformers keeps samples apart by positions that start again, but not in every model, and
not beside an attention mask.
"""

import math
from contextlib import suppress
from typing import Any

import torch

from autofit.data.batch import IGNORED_LABEL, labels_of
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode
from autofit.training.step import loss_value

_TOLERANCE = 1e-5  # relative, of a loss in fp32: what is masked is multiplied by 0
_LOW_PRECISION_TOLERANCE = 1e-3
_SPREAD = 10  # times the deviation of random weights
_MIXED = (
    "packed samples see one another in this model: with other tokens before it the loss of a sample"
    " is {other:.6g}, not {loss:.6g}. Models of transformers with attention alone keep them apart"
    " by position_ids that start again with each sample, where no attention_mask is given;"
    " otherwise give each sample a row of its own."
)


@torch.no_grad()
def note_of_mixed_samples(setup: Setup, batch: Any) -> str | None:
    """A sentence where packed samples see one another; None where they do not.

    Also None where the batch, of a few samples, has no packed ones. Random weights are different
    afterwards.
    """
    ids = labels_of(batch, "input_ids")
    labels = labels_of(batch)
    if ids is None or labels is None or ids.dim() != 2 or labels.shape != ids.shape:
        return None

    found = _last_sample(batch, ids)
    if found is None:
        return None

    row, start = found

    own_labels = torch.full_like(labels, IGNORED_LABEL)
    own_labels[row, start + 1 :] = labels[row, start + 1 :]

    other_ids = ids.clone()
    other_ids[row, :start] = ids[row, -1]  # a token that the model knows
    if bool((own_labels == IGNORED_LABEL).all()) or torch.equal(other_ids, ids):
        return None

    if setup.weights.are_random:  # with a deviation of 0.02, which hides what little is mixed
        for _, weight in setup.trainable():
            if weight.dim() > 1:
                weight.mul_(_SPREAD)

    loss = math.nan
    other = math.nan
    # a user's loss may not take rows without a label
    with suppress(Exception), evaluation_mode(setup.model):
        loss = loss_value(setup, _with(batch, input_ids=ids, labels=own_labels))
        other = loss_value(setup, _with(batch, input_ids=other_ids, labels=own_labels))

    tolerance = _TOLERANCE if setup.config.precision == "fp32" else _LOW_PRECISION_TOLERANCE
    if not math.isfinite(loss - other) or abs(loss - other) <= tolerance * abs(loss):
        return None

    return _MIXED.format(loss=loss, other=other)


def _last_sample(batch: Any, ids: torch.Tensor) -> tuple[int, int] | None:
    """A row that holds several samples, and where the last of them begins.

    Found by the bounds of samples, or by positions that start again.
    """
    for name in batch:
        if str(name).startswith("cu_seq") and len(ids) == 1:
            bounds = batch[name].tolist()
            if len(bounds) > 2:
                return 0, bounds[-2]
            return None

    positions = labels_of(batch, "position_ids")
    if positions is None or positions.shape != ids.shape:
        return None

    restarts = (positions[:, 1:] == 0).nonzero()
    if not len(restarts):
        return None

    row = int(restarts[0, 0])
    last = restarts[restarts[:, 0] == row][-1]
    return row, int(last[1]) + 1


def _with(batch: Any, **tensors: torch.Tensor) -> Any:
    """The batch with other tensors, of the same type."""
    made = type(batch)(batch)
    made.update(tensors)

    return made
