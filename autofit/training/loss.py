"""The loss of one micro-batch, the user's or the model's own, checked to be a trainable number."""

from typing import Any

import torch

from autofit.core.errors import InputError, RefusedError, multiple_losses_error
from autofit.core.forks import ending_forks
from autofit.data.batch import map_tensors
from autofit.setup import Setup
from autofit.training.default_loss import default_loss, is_several


def loss_and_count(setup: Setup, batch: Any) -> tuple[torch.Tensor, float | None]:
    """The mean loss of a micro-batch on the device.

    Also the number of its terms, where the loss gives that, as (sum, count). Raises InputError for
    what is no trainable number.
    """
    own_loss = setup.workload.loss
    compute = default_loss if own_loss is None else own_loss
    arguments = [setup.models(), batch]
    with ending_forks():
        if hasattr(own_loss, "over_batch"):
            totals = setup.progress.over_batch
            arguments.append(sums_over_batch(setup, batch) if totals is None else totals)
        loss = compute(*arguments)

    count: float | None = None
    if own_loss is not None and _is_sum_and_count(loss):
        total = loss[0]
        count = float(loss[1])
        loss = total / count if count else total * torch.nan

    _check_number(loss)
    if torch.is_grad_enabled() and not loss.requires_grad:
        # code of its own for the backward (Reformer's) may want inputs to be trained
        if setup.config.lora_rank:
            raise RefusedError(
                "no adapter takes part in the loss, by the model's own code; use lora_rank 0."
            )
        message = "the loss needs no gradient: no trainable weight takes part in it."
        raise InputError(message, "Check requires_grad.")
    return loss.reshape(()), count


def on_device(setup: Setup, micro_batch: Any) -> Any:
    """A micro-batch on the device, which may still be copied there."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(setup.device, non_blocking=True)

    return map_tensors(micro_batch, moved)


def sums_over_batch(setup: Setup, batch: Any) -> torch.Tensor:
    """What a loss with `over_batch` asks of a micro-batch on the device: sums over its samples.

    Added up over micro-batches and ranks they are those of the whole batch.
    """
    loss: Any = setup.workload.loss
    with torch.no_grad():
        sums: torch.Tensor = loss.over_batch(setup.models(), batch)
    return sums


def _is_sum_and_count(loss: Any) -> bool:
    """Whether a loss is a pair of a tensor to be trained and a plain number, not a second loss."""
    if not isinstance(loss, tuple) or len(loss) != 2:
        return False

    total, count = loss
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        return False

    if not isinstance(count, torch.Tensor):
        return isinstance(count, int | float) and not isinstance(count, bool)

    if count.numel() != 1 or count.requires_grad:
        return False
    return total.requires_grad or not count.is_floating_point()


def _check_number(loss: Any) -> None:
    """Raise an InputError for a loss that is not one number in a tensor."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return
        given = f"a tensor of shape {tuple(loss.shape)}"
        remedy = "Take its mean."
    elif is_several(loss):
        raise multiple_losses_error(f"the loss is a {type(loss).__name__} of {len(loss)}")
    else:
        given = type(loss).__name__
        remedy = "Let it return that tensor."

    raise InputError(f"the loss must be one number in a tensor, not {given}.", remedy)
