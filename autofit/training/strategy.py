"""Strategies of the training step: how one device, or several together, go through a batch.

`forward_backward` adds the gradients of a whole effective batch to the weights, however the batch
is cut and whoever sees which part of it. Several devices agree before they do, and reduce what they
found; one device does neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch

from autofit.core.errors import InputError
from autofit.data.batch import sample_count, split
from autofit.data.counts import counted_slices, counts_samples, weight_of
from autofit.setup import Setup
from autofit.training.local_batch import LocalBatch
from autofit.training.loss import loss_and_count, on_device, sums_over_batch
from autofit.training.replay import Replay, is_replayed


class SingleDevice:
    """The steps of one device. Holds nothing but the setup, which may change between steps."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def forward_backward(self, part: LocalBatch) -> torch.Tensor:
        """Add the gradients of a batch to the weights', micro-batch by micro-batch.

        They equal those of the unsplit batch. Returns its loss, detached, on the device. Where the
        backward applies gradients, none are applied of a loss that is not finite, which is
        returned.
        """
        setup = self.setup
        # already while data moves: the last step ended in "update"
        setup.progress.phase = "forward"
        batch_loss = torch.zeros((), device=setup.device)

        with self.over_batch(part), setup.step_context():
            if is_replayed(setup, part):
                return self._replayed(part)

            for loss, weight in self._losses(part):
                if weight != 1.0:
                    loss = loss * weight
                if not self._backward(loss):
                    return self._reduce(loss.detach())

                batch_loss += loss.detach().to(batch_loss.dtype)
                # with its graph: bitsandbytes' int8 layers hold their inputs as long as it lives
                del loss

        return self._reduce(batch_loss)

    def _replayed(self, part: LocalBatch) -> torch.Tensor:
        """The same of a loss that needs something of all samples at once."""
        replay = Replay(self.setup, part)
        self._begin(
            part,
            replay.samples(),
            replay.forwards,
        )
        losses = replay.losses()
        batch_loss = next(losses)

        for loss in losses:
            if not self._backward(loss):
                return self._reduce(loss.detach())

            del loss

        return self._reduce(batch_loss)

    def loss_of(self, part: LocalBatch) -> torch.Tensor:
        """The loss of all samples of a batch that needs something of them at once, without
        gradients."""
        with self.setup.step_context():
            return Replay(self.setup, part).loss()

    @contextmanager
    def over_batch(self, part: LocalBatch) -> Iterator[None]:
        """Inside, the loss knows what it asks of the whole batch, if it does."""
        setup = self.setup
        if not hasattr(setup.workload.loss, "over_batch"):
            yield
            return

        with setup.step_context():
            setup.progress.over_batch = self._sums_over_batch(part)

        try:
            yield
        finally:
            setup.progress.over_batch = None

    def _sums_over_batch(self, part: LocalBatch) -> torch.Tensor:
        """What the loss asks of all micro-batches, added up."""
        slices, _ = self._counted_slices(part)
        return self._sums_of(
            part,
            slices,
            len(slices),
        )

    def _sums_of(
        self,
        part: LocalBatch,
        slices: list[tuple[Any, float]],
        forwards: int,
    ) -> torch.Tensor:
        """The same by so many forwards: those beyond the micro-batches count nothing."""
        setup = self.setup
        spare = next(
            split(
                part.batch,
                setup.micro_batch_size,
                setup.workload.split,
            )
        )
        sums = []
        for number in range(max(1, forwards)):
            counts = number < len(slices)
            micro_batch = slices[number][0] if counts else spare
            moved = on_device(setup, micro_batch)
            with setup.forward_context():
                sums.append(counts * sums_over_batch(setup, moved))

        return torch.stack(sums).sum(dim=0)

    def forward(self, micro_batch: Any) -> tuple[torch.Tensor, float | None]:
        """The mean loss of a micro-batch, which is moved to the device, in a step context.

        Also the number of terms in it, where the loss gives it.
        """
        setup = self.setup
        setup.progress.phase = "forward"

        moved = on_device(setup, micro_batch)
        with setup.forward_context():
            return loss_and_count(setup, moved)

    def loss_value(self, batch: Any) -> float:
        """The loss of a batch, by a forward alone."""
        with self.setup.step_context():
            loss, _ = self.forward(batch)
            return float(loss.detach())

    def _losses(self, part: LocalBatch) -> Iterator[tuple[torch.Tensor, float]]:
        """The mean loss of each micro-batch, and its weight in the loss of the batch.

        Holds no loss that it gave.
        """
        slices, terms = self._counted_slices(part)
        self._begin(
            part,
            terms,
            len(slices),
        )
        for micro_batch, count in slices:
            yield self.forward(micro_batch)[0], weight_of(self.setup.workload, count, terms)

    def _counted_slices(self, part: LocalBatch) -> tuple[list[tuple[Any, float]], float]:
        """This device's micro-batches, each with the number of terms in its loss; terms in all."""
        if not part.counts:
            return [], 0

        setup = self.setup
        slices = counted_slices(setup.workload, part.batch, setup.micro_batch_size)
        return slices, sum(count for _, count in slices)

    def _begin(self, part: LocalBatch, terms: float, forwards: int) -> None:
        """Note how many terms the loss of the whole effective batch has.

        Raises InputError where each of several backwards would take a step.
        """
        setup = self.setup
        setup.progress.terms = terms

        if setup.stepped_in_backward and forwards > 1:
            samples = sample_count(part.batch, setup.workload.split)
            raise InputError(
                f"a batch of {samples} samples is more than one micro-batch of "
                f"{setup.micro_batch_size}, and each backward takes a step.",
                "Set optimizer_in_backward to false.",
            )

    def _backward(self, loss: torch.Tensor) -> bool:
        """Add the gradients of a loss to the weights'.

        False, and nothing done, where they would be applied at once and the loss is not finite:
        each weight would be NaN.
        """
        setup = self.setup
        setup.progress.phase = "backward"

        if setup.stepped_in_backward and not self._sum_over_ranks(loss.detach()).isfinite():
            return False

        if setup.scaler:
            loss = setup.scaler.scale(loss)

        loss.backward()
        return True

    def _reduce(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the effective batch, when all gradients are what they are on one device."""
        return loss

    def _sum_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class DataParallel(SingleDevice):
    """The steps of one of several ranks.

    Each gets its part of the effective batch, and those of one tensor or context group get the
    same. All decide alike on how a step goes on, or one would wait for ever for another.
    """

    def loss_value(self, batch: Any) -> float:
        """As on one device; all ranks call it together."""
        value = super().loss_value(batch)
        self.setup.exchange.reshard()

        return value

    def _losses(self, part: LocalBatch) -> Iterator[tuple[torch.Tensor, float]]:
        """As on one device, but of as many forwards as the rank with most micro-batches makes.

        Every forward gathers weights from all ranks. Those beyond a rank's own micro-batches count
        nothing, as does a part that is not to count.
        """
        setup = self.setup
        workload = setup.workload
        slices, own_terms = self._counted_slices(part)
        if slices:
            spare, _ = slices[0]
        else:
            spare = next(split(part.batch, setup.micro_batch_size, workload.split))

        forwards, early = self._agree(
            part,
            own_terms,
            len(slices),
            spare,
        )
        slices += [(spare, 0.0)] * (forwards - len(slices))

        for number in range(forwards):
            micro_batch, count = slices[number]
            setup.exchange.sync_gradients(number + 1 == forwards)
            if early:
                loss = early.pop()
            else:
                loss, _ = self.forward(micro_batch)

            if count:
                weight = weight_of(workload, count, setup.progress.terms)
                # Gradients are averaged over the ranks that see other samples.
                yield loss, weight * setup.ranks.layout.dp_degree
            else:
                yield loss.nan_to_num() * 0.0, 1.0

            del loss

        if early:  # no rank has a label
            early.clear()
            setup.exchange.reshard()

    def _sums_over_batch(self, part: LocalBatch) -> torch.Tensor:
        """As on one device, over all ranks. Each makes as many forwards as the one with most."""
        ranks = self.setup.ranks
        slices, _ = self._counted_slices(part)
        (most,) = ranks.largest(len(slices))
        sums = self._sums_of(
            part,
            slices,
            int(most),
        )
        self.setup.exchange.reshard()

        return ranks.sum_of(sums) * ranks.layout.dp_degree / ranks.layout.world

    def _agree(
        self,
        part: LocalBatch,
        own_terms: float,
        micro_batches: int,
        first: Any = None,
    ) -> tuple[int, list[torch.Tensor]]:
        """How many forwards each rank makes.

        Also the loss of the first one, if it is given, where that ran while ranks exchanged what
        they have: on two CPU ranks, to ask costs a step of 250 ms about 1.5 %.
        """
        setup = self.setup
        ranks = setup.ranks
        if part.largest is not None and counts_samples(setup.workload, part.batch):
            forwards = -(-part.largest // setup.micro_batch_size)
            self._begin(part, part.samples, forwards)
            return forwards, []

        early = []
        answer = ranks.asked(own_terms, micro_batches)
        # A GPU would have to end the forward before; that of ddp asks whether gradients are
        # averaged.
        is_free = setup.device.type == "cpu" and setup.exchange.replicate is None
        if first is not None and is_free:
            early.append(self.forward(first)[0])

        all_terms, most = answer()
        forwards = int(max(most))
        self._begin(
            part,
            sum(all_terms) * ranks.layout.dp_degree / ranks.layout.world,
            forwards,
        )

        return forwards, early

    def _reduce(self, loss: torch.Tensor) -> torch.Tensor:
        """Average over ranks what the backward did not, and return the loss of the effective batch.

        Other numbers that are added up travel with it: each time that ranks wait for one another
        costs a step of 200 ms on two CPU ranks about 1 %.
        """
        exchange = self.setup.exchange
        ranks = self.setup.ranks
        for average in exchange.after_backward:
            average()

        if not exchange.extra_reductions:
            return ranks.sum_of(loss) / ranks.layout.world

        own = [numbers() for numbers, _ in exchange.extra_reductions]
        sums = ranks.sum_of(
            torch.cat(
                [
                    loss.view(1),
                    loss.new_tensor(list(chain(*own))),
                ]
            )
        )

        rest = iter(sums[1:].tolist())
        for numbers, (_, use_sums) in zip(own, exchange.extra_reductions, strict=True):
            use_sums(list(islice(rest, len(numbers))))

        return sums[0] / ranks.layout.world

    def _sum_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        return self.setup.ranks.sum_of(loss.clone())
