"""Gradients of a loss at some coordinates of every weight.

They are compared between passes over the same samples.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from autofit.data.batch import map_tensors
from autofit.data.trial_batches import TRIAL_SAMPLES
from autofit.setup import Setup
from autofit.training.recorded_draws import RecordedDraws
from autofit.training.strategies import strategy_of
from autofit.training.varied_outcomes import VariedOutcomes

_COORDINATES = 2048  # of each weight's gradient that are compared
_SMALLEST = 1e-4  # of the largest gradient: a weight with a smaller one is compared with that


class NothingToCompareError(Exception):
    """A pass whose loss is not finite or reaches no weight, or that raises for single samples."""


class SampledGradients:
    """Gradients of a loss by all trained weights, always at the same coordinates of each weight."""

    def __init__(self, setup: Setup, varied: VariedOutcomes | None) -> None:
        self._setup = setup
        self._varied = varied
        self._weights: list[torch.Tensor] = []
        for _, weight in setup.trainable():
            if weight.is_floating_point() or weight.is_complex():
                self._weights.append(weight)

        self._coordinates: dict[int, torch.Tensor] = {}  # by the number of the weight
        self._sizes: list[float] = []

    def of(self, batch: Any) -> tuple[torch.Tensor, float | None]:
        """The gradient of the loss of a batch, and the count that the loss gave, if it did.

        The gradient is in fp64. Each weight's part is divided by its size in the first gradient.
        """
        setup = self._setup
        on_device = map_tensors(batch, lambda tensor: tensor.to(setup.device))
        if self._varied:
            self._varied.begin(on_device)

        with self._varied or nullcontext(), torch.enable_grad(), setup.step_context():
            loss, count = strategy_of(setup).forward(on_device)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NothingToCompareError(f"the loss is {value} with random weights")

            found = self._backward(loss)

        parts = []
        for number, weight in enumerate(self._weights):
            if number not in found:
                if number not in self._coordinates:  # nothing reached it in the first pass
                    zero = torch.zeros((), device=weight.device)
                    self._coordinates[number] = _coordinates(zero.expand(_real_shape(weight)))

                size = len(self._coordinates[number])
                found[number] = torch.zeros(size, dtype=torch.float64)

            parts.append(found[number])

        if not self._sizes:
            sizes = [float(part.norm()) for part in parts]
            largest = max(sizes)
            if not largest:
                raise NothingToCompareError("the loss has no gradient with random weights")

            self._sizes = [max(size, _SMALLEST * largest) for size in sizes]

        scaled = [part / size for part, size in zip(parts, self._sizes, strict=True)]
        return torch.cat(scaled), count

    def of_slices(
        self,
        slices: Sequence[Any],
        sizes: Sequence[int],
        draws: RecordedDraws,
    ) -> tuple[list[torch.Tensor | None], list[float | None]]:
        """The same of each slice of a batch; None and 0 where it has no valid label.

        Args:
            slices: of the batch.
            sizes: the number of samples of each.
            draws: of the batch; each slice gets those of its samples.
        """
        parts: list[torch.Tensor | None] = []
        own_counts: list[float | None] = []
        start = 0
        for part, size in zip(slices, sizes, strict=True):
            draws.replay(range(start, start + size))
            start += size

            try:
                with draws:
                    gradient, own_count = self.of(part)
            except NothingToCompareError:
                parts.append(None)
                own_counts.append(0.0)
            else:
                parts.append(gradient)
                own_counts.append(own_count)

        return parts, own_counts

    def _backward(self, loss: torch.Tensor) -> dict[int, torch.Tensor]:
        """The gradient at the coordinates of each weight that it reaches, by the weight's number.

        Each gradient is freed before the next is made, since memory for those of all weights
        together takes longer to get than they take to compute.
        """
        found: dict[int, torch.Tensor] = {}

        def take(number: int, weight: torch.Tensor) -> None:
            assert weight.grad is not None
            gradient = weight.grad.detach().to_dense()
            weight.grad = None
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient.resolve_conj())

            if number not in self._coordinates:
                self._coordinates[number] = _coordinates(gradient)

            coordinates = self._coordinates[number]
            taken = gradient.reshape(-1)[coordinates].to("cpu", torch.float64)
            if number in found:  # reentrant checkpointing comes twice
                taken = found[number] + taken

            found[number] = taken

        with ExitStack() as stack:
            for number, weight in enumerate(self._weights):
                handle = weight.register_post_accumulate_grad_hook(partial(take, number))
                stack.callback(handle.remove)

            loss.backward()

        return found


def _real_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight's gradient as real numbers."""
    if weight.is_complex():
        return (*weight.shape, 2)
    return tuple(weight.shape)


def _coordinates(gradient: torch.Tensor) -> torch.Tensor:
    """Which entries of a weight's gradient are compared.

    All of a small one; else some everywhere, and those of its strongest rows, since that of an
    embedding is zero for all tokens that a batch does not hold.
    """
    device = gradient.device
    size = gradient.numel()
    if size <= _COORDINATES:
        return torch.arange(size, device=device)

    half = _COORDINATES // 2
    everywhere = torch.arange(half, device=device) * (size // half)

    rows = gradient.unsqueeze(1)
    if gradient.dim() > 1:
        rows = gradient.flatten(1)

    width = rows.shape[1]
    count = min(len(rows), max(TRIAL_SAMPLES, half // width))
    strongest = rows.abs().sum(dim=1).topk(count).indices
    taken = min(width, half // count)
    columns = torch.linspace(0, width - 1, taken, device=device).long()
    of_rows = strongest.unsqueeze(1) * width + columns

    both = torch.cat([everywhere, of_rows.reshape(-1)])
    chosen: torch.Tensor = both.unique()
    return chosen
