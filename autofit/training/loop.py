"""The training step and the loop around it. A probe times `train_step`, a user runs `train_step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.core.hyperparameters import Hyperparameters
from autofit.setup import Setup
from autofit.training.data import loss_count, map_tensors, sample_count, split, weighted_slices


@dataclass(frozen=True)
class StepReport:
    """What a callback is told after every optimizer step."""

    step: int
    loss: float
    lr: float
    samples: int


def compute_loss(setup: Setup, batch: Any) -> torch.Tensor:
    """The workload's loss of one micro-batch, checked to be one number that can be trained on.

    Raises:
        InputError: not a tensor, not a scalar, or not connected to any trainable weight.
    """
    workload, model = setup.workload, setup.model
    loss = workload.loss(model, batch) if workload.loss is not None else _default_loss(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        remedy = "Take its mean." if isinstance(loss, torch.Tensor) else "Put labels in the batch, or give the loss."
        raise InputError(f"the loss must be one number in a tensor, not {given}.", remedy)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError("the loss needs no gradient: no trainable weight takes part in it.", "Check requires_grad.")
    return loss.reshape(())


def _default_loss(model: torch.nn.Module, batch: Any) -> Any:
    """`model(**batch).loss`, or what the model returns when that is the loss."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def accumulate(setup: Setup, batch: Any) -> torch.Tensor:
    """Forward and backward over all micro-batches of `batch`; returns its loss, detached, on the device.

    Gradients come out as of the unsplit batch, whatever the micro-batch.

    Raises:
        InputError: the backward applies gradients itself, and there is more than one.
    """
    batch_loss = torch.zeros((), device=setup.device)
    slices = weighted_slices(setup.workload, batch, setup.micro_batch_size)
    if setup.stepped_in_backward and len(slices) > 1:
        message = f"a batch of {sample_count(batch)} samples is more than one micro-batch of {setup.micro_batch_size}"
        raise InputError(f"{message}, and each backward takes a step.", "Set optimizer_in_backward to false.")
    for micro_batch, weight in slices:
        on_device = map_tensors(micro_batch, lambda tensor: tensor.to(setup.device, non_blocking=True))
        with setup.step_context():
            with setup.forward_context():
                loss = compute_loss(setup, on_device)
            weighted = loss * weight
            (setup.scaler.scale(weighted) if setup.scaler else weighted).backward()
        batch_loss += weighted.detach().to(batch_loss.dtype)
    return batch_loss


def update(setup: Setup) -> bool:
    """Apply the gradients, if the backward has not; False when there are none, or a loss scaler skipped the step."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    if setup.stepped_in_backward:
        return setup.stepped_in_backward()
    scaler, max_norm = setup.scaler, setup.hyperparameters.max_grad_norm
    if all(parameter.grad is None for _, parameter in setup.trainable()):
        return False  # no valid label in the whole batch; a scaler would not take that
    if max_norm is not None:
        if scaler:
            scaler.unscale_(setup.optimizer)
        torch.nn.utils.clip_grad_norm_([p for _, p in setup.trainable()], max_norm)
    if scaler:
        before = scaler.get_scale()
        scaler.step(setup.optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= before  # the scale only falls after a skipped step
    else:
        setup.optimizer.step()
        stepped = True
    setup.optimizer.zero_grad(set_to_none=True)
    return stepped


def train_step(setup: Setup, batch: Any) -> torch.Tensor:
    """One optimizer step on one effective batch; returns the batch's loss, detached, on the device."""
    loss = accumulate(setup, batch)
    update(setup)
    return loss


def learning_rate_factor(hyperparameters: Hyperparameters, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each step (0-based): linear warm-up, then the schedule down to 0."""

    def factor(step: int) -> float:
        warmup = hyperparameters.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if hyperparameters.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - progress if hyperparameters.schedule == "linear" else 1.0

    return factor


@torch.no_grad()
def evaluate(setup: Setup, batches: Iterable[Any]) -> float:
    """The mean loss over `batches`, in slices of the micro-batch, which is known to fit.

    Raises:
        InputError: no batch, or none with a valid label.
    """
    was_training = setup.model.training
    setup.model.eval()
    total, weight = 0.0, 0
    try:
        for batch in batches:
            for micro_batch in split(batch, setup.micro_batch_size):
                count = loss_count(setup.workload, micro_batch)
                if count:
                    on_device = map_tensors(micro_batch, lambda tensor: tensor.to(setup.device))
                    with setup.step_context(), setup.forward_context():
                        loss = float(compute_loss(setup, on_device))
                    total += loss if setup.workload.reduction == "sum" else loss * count
                    weight += count
    finally:
        setup.model.train(was_training)
    if not weight:
        raise InputError("there is nothing to evaluate on: no batch with a valid label.", "Check eval_loader.")
    return total / weight


def train(
    setup: Setup,
    batches: Iterable[Any],
    *,
    steps: int,
    first_step: int = 0,
    callbacks: Iterable[Callable[[StepReport], None]] = (),
) -> list[StepReport]:
    """Run optimizer steps `first_step` to `steps` over `batches` (long enough an iterable) and report each.

    Raises:
        InputError: the batches end early, or the loss is no longer finite (the message names the step).
    """
    assert setup.optimizer is not None, "build() sets the optimizer"
    factor = learning_rate_factor(setup.hyperparameters, steps)
    setup.model.train()
    reports: list[StepReport] = []
    iterator = iter(batches)
    for step in range(first_step, steps):
        batch = next(iterator, None)
        if batch is None:
            raise InputError(f"the data ended after {step} of {steps} steps.", "Give fewer steps, or more data.")
        lr = setup.hyperparameters.lr * factor(step)
        for group in setup.optimizer.param_groups:
            group["lr"] = lr
        loss = float(accumulate(setup, batch))
        if not math.isfinite(loss):
            message = f"the loss is {loss} at step {step}."
            raise InputError(message, "Lower the learning rate, or use precision bf16-mixed or fp32.")
        update(setup)
        report = StepReport(step=step, loss=loss, lr=lr, samples=sample_count(batch))
        reports.append(report)
        for callback in callbacks:
            callback(report)
    return reports
