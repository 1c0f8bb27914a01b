"""The mean loss on held-out data, in slices that cannot exhaust memory."""

import gc
from collections.abc import Iterable
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.data.batch import sample_count, samples_of
from autofit.data.counts import is_sum, loss_count
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode
from autofit.training.inspect import blamed_on
from autofit.training.local_batch import local_batch
from autofit.training.step import loss_value
from autofit.training.workload import batches_of, put_back


@torch.no_grad()
def evaluate(setup: Setup, batches: Iterable[Any]) -> float:
    """The mean loss over `batches`. Raises InputError where no batch has a valid label."""
    total, weight = _sums(setup, batches)
    if not weight:
        raise InputError(
            "there is nothing to evaluate on: no batch with a valid label.", "Check eval_loader."
        )
    return total / weight


@torch.no_grad()
def check_evaluation(setup: Setup, loader: Any) -> None:
    """Try the loss on one sample of the evaluation data before training starts."""
    with put_back(loader):
        first = next(batches_of(loader, name="eval_loader"), None)
    if first is None:
        raise InputError(
            "eval_loader is empty: it gave no batch.", "Check the data set, or leave it out."
        )

    sample = samples_of(first, 0, 1, setup.workload.split)
    with blamed_on("the loss on eval_loader's first sample"):
        # before its terms are counted, which says less of a wrong batch
        if not setup.ranks.are_several:
            with evaluation_mode(setup.model):
                loss_value(setup, sample)
        _sums(setup, [sample])


def _sums(setup: Setup, batches: Iterable[Any]) -> tuple[float, float]:
    """The sum of losses and the number of terms in it, of all ranks.

    Slices are as large as the micro-batch, which fits with gradients; where longer samples run out
    of memory, they are halved, on one device.
    """
    workload = setup.workload
    ranks = setup.ranks
    total = weight = 0.0
    size = setup.micro_batch_size

    with evaluation_mode(setup.model):
        for batch in batches:
            part = local_batch(setup, batch)
            samples = 0
            if part.counts:
                samples = sample_count(part.batch, workload.split)

            start = 0
            while ranks.largest(samples - start)[0] > 0:
                if start < samples:
                    stop = min(start + size, samples)
                    piece = samples_of(part.batch, start, stop, workload.split)
                    count = loss_count(workload, piece)
                else:  # a forward that only the other ranks need
                    piece = samples_of(part.batch, 0, 1, workload.split)
                    count = 0.0

                if count or ranks.are_several:
                    loss = _loss_if_it_fits(setup, piece, size)
                    if loss is None:
                        gc.collect()
                        if setup.device.type == "cuda":
                            torch.cuda.empty_cache()
                        size = max(1, size // 2)
                        continue

                    if count and is_sum(workload):
                        total += loss
                    elif count:
                        total += loss * count

                weight += count
                start += size

    total, everywhere = ranks.sums(total, weight)
    return total, everywhere


def _loss_if_it_fits(setup: Setup, part: Any, size: int) -> float | None:
    """The loss of some samples; None when memory ran out.

    In a function of its own, so that the handler's frames are freed before a retry.
    """
    try:
        return loss_value(setup, part)
    except Exception as error:
        if size == 1 or setup.ranks.are_several or not is_out_of_memory(error):
            raise
        return None
