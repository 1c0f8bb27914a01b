"""The mean loss on held-out data, in slices that cannot exhaust memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.data.batch import loss_count, sample_count, samples_of
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.training.inspect import blamed_on
from autofit.training.step import evaluation_mode, loss_value
from autofit.training.workload import batches_of


@torch.no_grad()
def evaluate(setup: Setup, batches: Iterable[Any]) -> float:
    """The mean loss over `batches`.

    Slices are as large as the micro-batch, which fits with gradients; where longer samples run out of memory, they
    are halved.

    Raises:
        InputError: no batch, or none with a valid label.
    """
    mean = _MeanLoss(setup)
    with evaluation_mode(setup.model):
        for batch in batches:
            mean.add(batch)
    if not mean.weight:
        raise InputError("there is nothing to evaluate on: no batch with a valid label.", "Check eval_loader.")
    return mean.total / mean.weight


@torch.no_grad()
def check_evaluation(setup: Setup, loader: Any) -> None:
    """Try the loss on one sample of the evaluation data before training starts.

    Raises:
        InputError: it can be read only once, is empty, or the loss raises.
    """
    first = next(batches_of(loader, name="eval_loader"), None)
    if first is None:
        raise InputError("eval_loader is empty: it gave no batch.", "Check the data set, or leave it out.")
    with evaluation_mode(setup.model), blamed_on("the loss on eval_loader's first sample"):
        _MeanLoss(setup).add(samples_of(first, 0, 1))


class _MeanLoss:
    """Sums losses and what they count, in slices that fit."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._size = setup.micro_batch_size
        self.total, self.weight = 0.0, 0

    def add(self, batch: Any) -> None:
        start, samples = 0, sample_count(batch)
        while start < samples:
            if self._fits(samples_of(batch, start, min(start + self._size, samples))):
                start += self._size
                continue
            gc.collect()
            if self._setup.device.type == "cuda":
                torch.cuda.empty_cache()
            self._size = max(1, self._size // 2)

    def _fits(self, part: Any) -> bool:
        """Add the loss of a slice; False when memory ran out: the handler's frames must be gone before the retry."""
        setup, count = self._setup, loss_count(self._setup.workload, part)
        if not count:
            return True
        try:
            loss = loss_value(setup, part)
        except Exception as error:
            if self._size == 1 or not is_out_of_memory(error):
                raise
            return False
        self.total += loss if setup.workload.reduction == "sum" else loss * count
        self.weight += count
        return True
