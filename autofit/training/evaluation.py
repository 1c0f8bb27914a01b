"""The mean loss on data that is not trained on, in slices that cannot exhaust memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.data.batch import loss_count, map_tensors, sample_count, samples_of
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.training.inspect import blamed_on
from autofit.training.step import compute_loss
from autofit.training.workload import batches_of


@torch.no_grad()
def evaluate(setup: Setup, batches: Iterable[Any]) -> float:
    """The mean loss over `batches`.

    In slices of the micro-batch, which is known to fit with gradients; where samples are larger than any that were
    trained on and memory runs out, in halves of it.

    Raises:
        InputError: no batch, or none with a valid label.
    """
    was_training = setup.model.training
    setup.model.eval()
    mean = _Mean(setup)
    try:
        for batch in batches:
            mean.add(batch)
    finally:
        setup.model.train(was_training)
    if not mean.weight:
        raise InputError("there is nothing to evaluate on: no batch with a valid label.", "Check eval_loader.")
    return mean.total / mean.weight


@torch.no_grad()
def check_evaluation(setup: Setup, loader: Any) -> None:
    """Try the loss on one sample of the evaluation data, before a pass of training that a mistake in it would cost.

    Raises:
        InputError: it can be read only once, is empty, or the loss raises.
    """
    first = next(batches_of(loader, name="eval_loader"), None)
    if first is None:
        raise InputError("eval_loader is empty: it gave no batch.", "Check the data set, or leave it out.")
    setup.model.eval()
    try:
        with blamed_on("the loss on eval_loader's first sample"):
            _Mean(setup).add(samples_of(first, 0, 1))
    finally:
        setup.model.train()


class _Mean:
    """A sum of losses and of what they count, and the size of slices that fits."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._size = setup.micro_batch_size
        self.total, self.weight = 0.0, 0

    def add(self, batch: Any) -> None:
        start, samples = 0, sample_count(batch)
        while start < samples:
            part = samples_of(batch, start, min(start + self._size, samples))
            if self._tried(part):
                start += self._size
                continue
            gc.collect()
            if self._setup.device.type == "cuda":
                torch.cuda.empty_cache()
            self._size = max(1, self._size // 2)

    def _tried(self, part: Any) -> bool:
        """Add the loss of a slice; False when memory ran out, for which the handler must have been left."""
        setup, count = self._setup, loss_count(self._setup.workload, part)
        if not count:
            return True
        try:
            on_device = map_tensors(part, lambda tensor: tensor.to(setup.device))
            with setup.step_context(), setup.forward_context():
                loss = float(compute_loss(setup, on_device))
        except Exception as error:
            if self._size == 1 or not is_out_of_memory(error):
                raise
            return False
        self.total += loss if setup.workload.reduction == "sum" else loss * count
        self.weight += count
        return True
