"""Losses that couple all samples of a batch, in micro-batches (Gao et al. 2021, "GradCache",
arXiv:2101.06983).

Such a loss says what of a batch it needs at once: a representation of each sample. All are computed
without gradients, the loss and its gradient of each representation follow, and then each
micro-batch runs again, with the same random draws, to hand that gradient on to the weights. That is
the gradient of the whole batch up to rounding, at the price of a second forward.
"""

from collections.abc import Iterator
from typing import Any

import torch

from autofit.core.errors import RefusedError
from autofit.data.batch import sample_count, split, take_samples
from autofit.data.text_lengths import cut_to, text_lengths
from autofit.setup import Setup
from autofit.training import random_state
from autofit.training.local_batch import LocalBatch
from autofit.training.loss import on_device


def has_representations(loss: Any) -> bool:
    """Whether a loss says what represents a sample: it has `represent` and `of_representations`."""
    return hasattr(loss, "represent") and hasattr(loss, "of_representations")


def _slices(setup: Setup, part: LocalBatch) -> list[tuple[Any, list[int]]]:
    """The micro-batches of a batch, each with the places of its samples.

    Texts of like length come together, the longest first, without the columns that all of them pad:
    as many as have the tokens of a micro-batch of the longest ones, which is what was measured.
    """
    batch = part.batch
    cut = setup.workload.split
    size = setup.micro_batch_size
    lengths = None
    # Compiled code is made for one length, and a trace has no numbers.
    if setup.config.compile == "none" and setup.tracing.whole_batch is None:
        lengths = text_lengths(batch, cut)
    if lengths is None:
        total = sample_count(batch, cut)
        places = [list(range(start, min(start + size, total))) for start in range(0, total, size)]
        return list(zip(split(batch, size, cut), places, strict=True))

    order = lengths.argsort(descending=True, stable=True)
    tokens = size * (setup.workload.sequence_length or 0)
    found = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        samples = order[start : start + max(size, tokens // max(longest, 1))].tolist()
        texts = take_samples(batch, samples, cut)
        found.append((cut_to(texts, longest), samples))
        start += len(samples)

    return found


def is_replayed(setup: Setup, part: LocalBatch) -> bool:
    """Whether the samples of a batch are not all there at once, and its loss needs them so."""
    if not has_representations(setup.workload.loss):
        return False
    if setup.ranks.are_several or setup.tracing.whole_batch is not None:
        return True

    return sample_count(part.batch, setup.workload.split) > setup.micro_batch_size


class Replay:
    """One batch, first without and then with gradients."""

    def __init__(self, setup: Setup, part: LocalBatch) -> None:
        layout = setup.ranks.layout
        if layout.world > layout.dp_degree:
            raise RefusedError(
                "a loss of representations was not tried beside tensor_parallel or "
                "context_parallel; use data_parallel alone."
            )

        self._setup = setup
        self._loss: Any = setup.workload.loss
        slices = _slices(setup, part) if part.counts else []
        self._own = self.forwards = len(slices)
        # Every forward gathers weights from all ranks: each makes as many as the one with most.
        (most,) = setup.ranks.largest(len(slices))

        spare = next(
            split(
                part.batch,
                setup.micro_batch_size,
                setup.workload.split,
            )
        )
        self._slices = [*slices, *[(spare, [])] * (int(most) - len(slices))]
        self._draws: list[dict[str, Any]] = []

    def loss(self) -> torch.Tensor:
        """The loss of the batch, without gradients."""
        with torch.no_grad():
            everything, _ = self._gathered(self._represented())
            value: torch.Tensor = self._loss.of_representations(everything)

        return value

    def losses(self) -> Iterator[torch.Tensor]:
        """For each micro-batch what has the batch's gradients; the first one is the loss of the
        batch.

        The loss itself needs no backward.
        """
        everything, own = self._gathered(self._represented())
        everything.requires_grad_()
        with torch.enable_grad():
            loss = self._loss.of_representations(everything)

        (gradient,) = torch.autograd.grad(loss, everything)
        gradient = gradient[own] * self._setup.ranks.layout.dp_degree  # which average it
        yield loss.detach()
        del loss, everything

        for number, (micro_batch, samples) in enumerate(self._slices):
            self._setup.exchange.sync_gradients(number + 1 == len(self._slices))
            random_state.restore(self._draws[number], self._setup.device)
            representations = self._represent(micro_batch)
            if number < self._own:
                yield (representations * gradient[samples]).sum()
            else:
                yield representations.sum() * 0.0

            del representations

    def _represented(self) -> torch.Tensor:
        """The representations of all own samples, [samples, ...]."""
        whole: torch.Tensor | None = None
        for number, (micro_batch, samples) in enumerate(self._slices):
            self._draws.append(random_state.capture_torch(self._setup.device))
            with torch.no_grad():
                found = self._represent(micro_batch)
            if whole is None:
                whole = found.new_empty((self.samples(), *found.shape[1:]))
            if number < self._own:
                whole[samples] = found

        assert whole is not None, "a batch has samples"
        self._setup.exchange.reshard()

        return whole

    def samples(self) -> int:
        """How many samples this device sees."""
        if self._setup.tracing.whole_batch is not None:
            return self._setup.tracing.whole_batch
        return sum(len(samples) for _, samples in self._slices[: self._own])

    def _represent(self, micro_batch: Any) -> torch.Tensor:
        setup = self._setup
        setup.progress.phase = "forward"
        moved = on_device(setup, micro_batch)
        with setup.forward_context():
            found: torch.Tensor = self._loss.represent(setup.models(), moved)

        return found

    def _gathered(self, own: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """The representations of all ranks, in the order of the batch, and which of them are its
        own."""
        ranks = self._setup.ranks
        if not ranks.are_several:
            return own, slice(None)

        counts = [int(count) for count in ranks.everywhere(len(own))[0]]
        start = sum(counts[: ranks.rank])
        whole = own.new_zeros((sum(counts), *own.shape[1:]))
        whole[start : start + len(own)] = own

        return ranks.sum_of(whole), slice(start, start + len(own))
