"""The training step: gradients of a batch, then an update. A probe times `train_step`; the training
loop repeats it."""

from typing import Any

import torch
from torch import nn

from autofit.data.batch import few_samples
from autofit.distributed.kinds import clip
from autofit.setup import Setup
from autofit.training import random_state
from autofit.training.local_batch import LocalBatch
from autofit.training.strategies import strategy_of


def train_step(setup: Setup, batch: Any) -> torch.Tensor:
    """One optimizer step on one effective batch; returns the batch's loss, detached, on the
    device."""
    loss = accumulate(setup, batch)
    update(setup)
    return loss


def accumulate(setup: Setup, batch: Any) -> torch.Tensor:
    """Forward and backward over all micro-batches of `batch`; returns its loss on the device.

    The loss is detached. Where several ranks train, `batch` is this one's part of the effective
    batch, and the loss that of the whole.
    """
    if not isinstance(batch, LocalBatch):
        batch = LocalBatch(batch)
    return strategy_of(setup).forward_backward(batch)


def update(setup: Setup) -> bool:
    """Apply the gradients unless the backward did.

    False when there are none, or the loss scaler skipped the step.
    """
    optimizer = setup.optimizer
    scaler = setup.scaler
    if setup.stepped_in_backward:
        return setup.stepped_in_backward()

    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if setup.part is None and all(parameter.grad is None for parameter in trained):
        return False  # no valid label in the whole batch, which a scaler does not accept

    setup.progress.phase = "update"
    max_norm = setup.hyperparameters.max_grad_norm
    if max_norm is not None:
        if scaler:
            scaler.unscale_(optimizer)
        host_params = setup.host_params()
        clipped = [host_params.get(parameter, parameter) for parameter in trained]
        tied: list[nn.Parameter] = []
        if setup.part is not None:
            tied = list(setup.part.tied)
        setup.progress.gradient_norm = clip(
            clipped,
            max_norm,
            stages=setup.ranks.layout.pipeline,
            twice=[host_params.get(parameter, parameter) for parameter in tied],
        )

    is_stepped = True
    if scaler:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        is_stepped = bool(scaler.get_scale() >= scale)  # it only falls after a skipped step
    else:
        optimizer.step()

    optimizer.zero_grad(set_to_none=True)
    return is_stepped


def loss_value(setup: Setup, batch: Any) -> float:
    """The loss of a batch of any device, without a backward."""
    return strategy_of(setup).loss_value(batch)


def reached(setup: Setup) -> set[nn.Parameter]:
    """The trained weights that the loss of a micro-batch reaches, found in the graph of its
    forward.

    Neither running statistics nor random numbers are other ones after it.
    """
    batch = few_samples(setup.workload, setup.micro_batch_size)
    buffers = [(buffer, buffer.clone()) for buffer in setup.model.buffers()]
    with random_state.preserved(setup.device), setup.step_context():
        loss, _ = strategy_of(setup).forward(batch)
    for buffer, before in buffers:
        buffer.copy_(before)

    weights = set()
    seen: set[Any] = {None}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            weights.add(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return weights
