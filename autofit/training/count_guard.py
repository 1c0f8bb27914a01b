"""A check of every batch for what earlier ones did not tell: which count a loss averages over.

Samples with all their labels do not tell a mean over samples from one over labels. Training may
begin all the same, since both give the same. The first batch in which they differ is tried before
it is trained.
"""

import dataclasses
from collections.abc import Callable

from autofit.core.errors import InputError
from autofit.core.workload import Count
from autofit.data.batch import split
from autofit.data.counts import counted
from autofit.setup import Setup
from autofit.training.inspect import Prover
from autofit.training.local_batch import LocalBatch

_SAME = 1e-9  # relative difference of weights that rounding makes


class CountGuard:
    """Watches for batches in which other counts differ from the one that weighs slices."""

    def __init__(self, setup: Setup, prover: Prover, notify: Callable[[str], object]) -> None:
        self._setup = setup
        self._prover = prover
        self._notify = notify

    def check(self, part: LocalBatch) -> None:
        """Prove the count again where this rank's part of a batch tells more than earlier ones.

        Raises InputError where its loss cannot be split after all.
        """
        setup = self._setup
        traits = setup.workload.traits
        if traits is None or traits.count is None:
            return
        if not traits.rivals or not part.counts:
            return
        if not self._differing(traits.count, traits.rivals, part):
            return

        proof = self._prover.proof(part.batch)
        if proof.count is None:
            raise InputError(
                f"the loss of this batch cannot be split: {proof.reason}.",
                "Say with count= what it is a mean over, or train without micro-batches.",
            )

        chosen = traits.count
        if chosen != proof.count and chosen not in proof.rivals:
            chosen = proof.count
            found = f"the loss is a mean over {chosen}"
            if setup.ranks.are_several:  # the others weigh their slices by the count before
                raise InputError(
                    f"{found}, which only a batch in training shows.",
                    "Give that as count=, a function of a batch.",
                )
            self._notify(f"{found}: this batch is the first that shows it.")

        rivals = tuple(rival for rival in proof.rivals if rival in traits.rivals)
        traits = dataclasses.replace(traits, count=chosen, rivals=rivals)
        setup.workload = dataclasses.replace(setup.workload, traits=traits)

    def _differing(self, chosen: Count, rivals: tuple[Count, ...], part: LocalBatch) -> bool:
        """Whether a rival would weigh the slices of a batch otherwise."""
        cut = self._setup.workload.split
        slices: list[object] = []
        for rival in rivals:
            if _leaves_nothing_out(rival, part.batch) and chosen.kind == "samples":
                continue

            if not slices:
                slices = list(split(part.batch, self._setup.micro_batch_size, cut))
            ours = [counted(chosen, micro_batch, cut) for micro_batch in slices]
            theirs = [counted(rival, micro_batch, cut) for micro_batch in slices]
            if not _are_proportional(ours, theirs):
                return True
        return False


def _leaves_nothing_out(count: Count, batch: object) -> bool:
    """Whether a count of entries that differ from a value counts all entries, as samples do."""
    if count.kind != "unequal" or count.mask is not None:
        return False

    counts = dataclasses.replace(count, columns="all")
    everything = dataclasses.replace(counts, kind="elements")
    return counted(counts, batch) == counted(everything, batch)


def _are_proportional(ours: list[float], theirs: list[float]) -> bool:
    """Whether slices weigh the same by two counts."""
    our_total = sum(ours)
    their_total = sum(theirs)
    if not our_total or not their_total:
        return our_total == their_total

    pairs = zip(ours, theirs, strict=True)
    return all(abs(our / our_total - their / their_total) <= _SAME for our, their in pairs)
