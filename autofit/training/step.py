"""The training step: loss, gradients, update. A probe times `train_step`; the training loop repeats it for the user."""

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, RefusedError, multiple_losses_error
from autofit.core.forks import ending_forks
from autofit.data.batch import few_samples, map_tensors, sample_count, split
from autofit.data.counts import counted_slices, counts_samples, weight_of
from autofit.distributed.kinds import clip
from autofit.setup import Setup
from autofit.training import random_state
from autofit.training.default_loss import default_loss, is_several
from autofit.training.own_part import OwnPart


def compute_loss(setup: Setup, batch: Any) -> torch.Tensor:
    """The workload's mean loss of one micro-batch, checked to be a trainable scalar."""
    return loss_and_count(setup, batch)[0]


def loss_and_count(setup: Setup, batch: Any) -> tuple[torch.Tensor, float | None]:
    """The mean loss of one micro-batch, and the number of its terms where the loss gives it, as (sum, count)."""
    workload, model = setup.workload, setup.model
    with ending_forks():
        loss = workload.loss(model, batch) if workload.loss is not None else default_loss(model, batch)
    count: float | None = None
    if workload.loss is not None and _is_sum_and_count(loss):
        count = float(loss[1])
        loss = loss[0] / count if count else loss[0] * torch.nan
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        if is_several(loss):
            raise multiple_losses_error(f"the loss is a {type(loss).__name__} of {len(loss)}")
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        remedy = "Take its mean." if isinstance(loss, torch.Tensor) else "Let it return that tensor."
        raise InputError(f"the loss must be one number in a tensor, not {given}.", remedy)
    if torch.is_grad_enabled() and not loss.requires_grad:
        if setup.config.lora_rank:  # code of its own for the backward (Reformer's) may want inputs to be trained
            raise RefusedError("no adapter takes part in the loss, by the model's own code; use lora_rank 0.")
        raise InputError("the loss needs no gradient: no trainable weight takes part in it.", "Check requires_grad.")
    return loss.reshape(()), count


def _is_sum_and_count(loss: Any) -> bool:
    """Whether a loss is a pair of a tensor to be trained and a plain number, which is no second loss."""
    if not isinstance(loss, tuple) or len(loss) != 2:
        return False
    total, count = loss
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        return False
    if isinstance(count, torch.Tensor):
        return count.numel() == 1 and not count.requires_grad and (total.requires_grad or not count.is_floating_point())
    return isinstance(count, int | float) and not isinstance(count, bool)


def loss_value(setup: Setup, batch: Any) -> float:
    """The loss of a batch of any device, without a backward."""
    on_device = map_tensors(batch, lambda tensor: tensor.to(setup.device))
    with setup.step_context(), setup.forward_context():
        value = float(compute_loss(setup, on_device).detach())
    setup.reshard()
    return value


def reached(setup: Setup) -> set[nn.Parameter]:
    """The trained weights that the loss of a micro-batch reaches, found in the graph of its forward. Neither running
    statistics nor random numbers are other ones after it."""
    batch = few_samples(setup.workload, setup.micro_batch_size)
    on_device = map_tensors(batch, lambda tensor: tensor.to(setup.device))
    buffers = [(buffer, buffer.clone()) for buffer in setup.model.buffers()]
    with random_state.preserved(setup.device), setup.step_context(), setup.forward_context():
        graph: list[Any] = [compute_loss(setup, on_device).grad_fn]
    for buffer, before in buffers:
        buffer.copy_(before)
    nodes = set(graph)
    while graph:
        following = {node for node, _ in graph.pop().next_functions if node is not None} - nodes
        nodes |= following
        graph.extend(following)
    return {node.variable for node in nodes if hasattr(node, "variable")}


def accumulate(setup: Setup, batch: Any) -> torch.Tensor:
    """Forward and backward over all micro-batches of `batch`; returns its loss, detached, on the device. Gradients
    equal those of the unsplit batch, whatever the micro-batch.

    Where several ranks train, `batch` is this one's part of the effective batch, and the loss that of the whole. Each
    makes as many forwards as the one with most micro-batches, since every forward gathers weights from all; those
    beyond its own count nothing, as does an `OwnPart` that is not to count.
    """
    setup.phase = "forward"  # already while data moves: the last step ended in "update"
    batch_loss = torch.zeros((), device=setup.device)
    workload, ranks = setup.workload, setup.ranks
    part = batch if isinstance(batch, OwnPart) else OwnPart(batch)
    slices = counted_slices(workload, part.batch, setup.micro_batch_size) if part.counts else []
    known = _known(setup, part)
    asked = [ranks.asked(sum(count for _, count in slices), len(slices))] if known is None else []
    # The answer travels during the first forward; but that of ddp asks whether gradients are averaged, and a GPU would
    # have to end it first.
    is_late = known is None and ranks.are_several and setup.replicate is None and setup.device.type == "cpu"
    most = None if is_late else _agree(setup, known or _exchanged(setup, asked), part.batch)
    spare = slices[0][0] if slices else next(split(part.batch, setup.micro_batch_size, workload.split))
    number = 0
    while most is None or number < most:
        micro_batch, count = slices[number] if number < len(slices) else (spare, 0)
        number += 1
        setup.sync_gradients(number == most)
        setup.phase = "forward"
        on_device = map_tensors(micro_batch, lambda tensor: tensor.to(setup.device, non_blocking=True))
        with setup.step_context():
            with setup.forward_context():
                loss = compute_loss(setup, on_device)
            if most is None:
                most = _agree(setup, _exchanged(setup, asked), part.batch)
                setup.sync_gradients(number == most)
                if not most:
                    setup.reshard()
                    break
            # Gradients are averaged over ranks.
            weight = weight_of(workload, count, setup.counted) * ranks.layout.samplers if count else 0.0
            weighted = loss.nan_to_num() * 0.0 if not weight else loss * weight if weight != 1.0 else loss
            setup.phase = "backward"
            if setup.stepped_in_backward:  # its backward would write NaN into every weight
                everywhere = weighted.detach()
                if ranks.are_several:
                    everywhere = ranks.sum_of(everywhere.clone())
                if not everywhere.isfinite():
                    return everywhere
            (setup.scaler.scale(weighted) if setup.scaler else weighted).backward()
        batch_loss += weighted.detach().to(batch_loss.dtype)
        del loss, weighted  # with their graph: bitsandbytes' int8 layers hold their inputs as long as it lives
    for average in setup.after_backward:
        average()
    return _of_all_ranks(setup, batch_loss) if ranks.are_several else batch_loss


def _of_all_ranks(setup: Setup, batch_loss: torch.Tensor) -> torch.Tensor:
    """The loss of the effective batch. Whatever else is added up over ranks goes along: each time that they wait for
    one another costs a step of 200 ms on two CPU ranks about 1 %."""
    if not setup.added_up:
        return setup.ranks.sum_of(batch_loss) / setup.ranks.layout.world
    own = [numbers() for numbers, _ in setup.added_up]
    sums = setup.ranks.sum_of(torch.cat([batch_loss.view(1), batch_loss.new_tensor(list(chain(*own)))]))
    rest = iter(sums[1:].tolist())
    for numbers, (_, use) in zip(own, setup.added_up, strict=True):
        use(list(islice(rest, len(numbers))))
    return sums[0] / setup.ranks.layout.world


def _known(setup: Setup, part: OwnPart) -> tuple[float, int] | None:
    """The terms of the effective batch's loss and the most micro-batches that any rank has, where no rank needs to ask:
    on two CPU ranks the exchange costs a step of 250 ms about 1.5 %."""
    if part.largest is None or not counts_samples(setup.workload, part.batch):
        return None
    return part.samples, -(-part.largest // setup.micro_batch_size)


def _exchanged(setup: Setup, asked: list[Callable[[], list[tuple[float, ...]]]]) -> tuple[float, int]:
    """The same from what all ranks count."""
    layout = setup.ranks.layout
    counted, made = asked.pop()()
    return sum(counted) * layout.samplers / layout.world, int(max(made))


def _agree(setup: Setup, agreed: tuple[float, int], batch: Any) -> int:
    """The most micro-batches that any rank has; notes how many terms the loss of the whole effective batch has."""
    setup.counted, most = agreed
    if setup.stepped_in_backward and most > 1:
        samples = sample_count(batch, setup.workload.split)
        message = f"a batch of {samples} samples is more than one micro-batch of {setup.micro_batch_size}"
        raise InputError(f"{message}, and each backward takes a step.", "Set optimizer_in_backward to false.")
    return most


def update(setup: Setup) -> bool:
    """Apply the gradients unless the backward did; False when there are none or the loss scaler skipped the step."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    if setup.stepped_in_backward:
        return setup.stepped_in_backward()
    scaler, max_norm = setup.scaler, setup.hyperparameters.max_grad_norm
    trained = [parameter for group in setup.optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in trained):
        return False  # no valid label in the whole batch, which a scaler does not accept
    setup.phase, stepped = "update", True
    if max_norm is not None:
        if scaler:
            scaler.unscale_(setup.optimizer)
        at_rest = setup.at_rest()  # with their gradients on the host
        setup.gradient_norm = clip([at_rest.get(each, each) for each in trained], max_norm)
    if scaler:
        before = scaler.get_scale()
        scaler.step(setup.optimizer)
        scaler.update()
        stepped = bool(scaler.get_scale() >= before)  # the scale only falls after a skipped step
    else:
        setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    return stepped


def train_step(setup: Setup, batch: Any) -> torch.Tensor:
    """One optimizer step on one effective batch; returns the batch's loss, detached, on the device."""
    loss = accumulate(setup, batch)
    update(setup)
    return loss
