"""What a loss averages over, as the gradients of a batch and of its slices show it.

Where the gradient of a batch is a weighted sum of those of its slices, the weights tell what the
loss averages over: they are those of samples, of valid labels, or of another count of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autofit.core.workload import Count, Workload
from autofit.data import counts
from autofit.data.batch import sample_count
from autofit.training.sampled_gradients import NothingToCompareError

_GIVEN_COUNT = 1e-6  # a count of the user's may be a sum of fp32 numbers
_SAME_WEIGHT = 1e-3  # of a sample, by two counts that gradients cannot tell apart
_HOLDS = 1e-4  # relative deviation of many samples in fp32 that rounding may cause


@dataclass(frozen=True)
class Proof:
    """What gradients show of a loss.

    Attributes:
        count: what the loss averages over; None where it cannot be split.
        rivals: other counts that agree with it on all that was seen.
        reason: why it cannot be split.
        deviation: of the weighted sum from the whole gradient, relative.
    """

    count: Count | None
    rivals: tuple[Count, ...] = ()
    reason: str = ""
    deviation: float = 0.0


class AlikeError(NothingToCompareError):
    """Samples whose gradients do not tell their weights."""

    def __init__(self) -> None:
        super().__init__(
            "the gradients of the samples at hand are too much alike to tell their weights"
        )


@dataclass(frozen=True)
class Evidence:
    """The gradient of a batch and those of its slices.

    Attributes:
        whole: the gradient of the batch.
        parts: those of the slices; None of one without a valid label.
        own_counts: what a loss of (sum, count) counted in each slice.
    """

    workload: Workload
    batch: Any
    slices: Sequence[Any]
    whole: torch.Tensor
    parts: Sequence[torch.Tensor | None]
    own_counts: Sequence[float | None]

    def columns(self) -> torch.Tensor:
        """The gradients of the slices, [coordinates, slices]; zero where there is none."""
        columns = []
        for part in self.parts:
            if part is None:
                part = torch.zeros_like(self.whole)

            columns.append(part)

        return torch.stack(columns, dim=1)

    def deviation(self, weights: torch.Tensor | None) -> float:
        """How far the slices' gradients with these weights are from the whole one, relative."""
        if weights is None:
            return math.inf
        return relative_difference(self.columns() @ weights, self.whole)

    def weights_by(self, count: Count | None) -> torch.Tensor | None:
        """The weights by what the workload says of its loss, else by this count.

        None where they cannot be those of this loss.
        """
        workload = self.workload
        is_sum = workload.reduction == "sum"
        number_of = workload.count
        if number_of is None:
            count = count or counts.SAMPLES
            is_sum = is_sum or count.kind == "sum"
            number_of = partial(counts.counted, count, split=workload.split)

        numbers = [float(number_of(micro_batch)) for micro_batch in self.slices]
        for number, part in zip(numbers, self.parts, strict=True):
            if number and part is None:
                return None

        if is_sum:
            return torch.ones(len(numbers), dtype=torch.float64)
        if not sum(numbers):
            return None

        weights = torch.tensor(numbers, dtype=torch.float64) / sum(numbers)
        if not self._agrees_with_own_counts(weights):
            return None

        return weights

    def _agrees_with_own_counts(self, weights: torch.Tensor) -> bool:
        """Whether they are the weights by what the loss counted itself, if it did."""
        own = [count for count in self.own_counts if count is not None]
        total = math.fsum(own)
        if len(own) != len(weights) or not total:
            return True

        given = torch.tensor(own, dtype=torch.float64) / total

        return torch.allclose(weights, given, rtol=1e-6, atol=1e-9)


def judge(evidence: Evidence, tolerance: float, alike: float) -> Proof:
    """What the gradients of single samples show: the counts whose weights give the whole gradient.

    Args:
        tolerance: the relative deviation that rounding may cause.
        alike: the second by the largest singular value of gradients that tell nothing.
    """
    workload = evidence.workload
    found = _best_weights(evidence, alike)
    shown = ", ".join(f"{weight:.4g}" for weight in found.tolist())

    left = evidence.deviation(found)
    if left > tolerance:
        reason = (
            "no weights of single samples' gradients give that of all:"
            f" {left:.2g} of it is left over"
        )
        return Proof(None, reason=reason, deviation=left)

    if workload.count is not None or workload.reduction == "sum":
        deviation = evidence.deviation(evidence.weights_by(None))
        if deviation <= max(tolerance, _GIVEN_COUNT):
            return Proof(counts.SAMPLES, deviation=deviation)

        given = "a sum" if workload.reduction == "sum" else "a mean over count="
        reason = f"it is not {given}: the weights of its samples are {shown}"
        return Proof(None, reason=reason, deviation=1.0)

    accepted: dict[Count, torch.Tensor] = {}
    for count in counts.candidates(evidence.batch):
        weights = evidence.weights_by(count)
        if weights is not None and evidence.deviation(weights) <= tolerance:
            accepted[count] = weights

    if not accepted:
        reason = f"it weights samples by {shown}, and nothing in the batch counts so"
        return Proof(None, reason=reason, deviation=1.0)

    chosen, *_ = accepted
    for weights in accepted.values():
        if not torch.allclose(weights, accepted[chosen], atol=_SAME_WEIGHT):
            raise AlikeError

    default = counts.by_task(workload, evidence.batch)
    if default in accepted:
        chosen = default

    rivals = tuple(count for count in accepted if count != chosen)

    return Proof(
        chosen,
        rivals,
        deviation=evidence.deviation(accepted[chosen]),
    )


def _best_weights(evidence: Evidence, alike: float) -> torch.Tensor:
    """The weights of samples whose gradients come closest to the whole one.

    Raises NothingToCompareError where they are not determined.
    """
    columns = evidence.columns()
    is_present = columns.norm(dim=0) > 0
    present = columns[:, is_present]
    if present.shape[1] < 2:
        raise NothingToCompareError("the loss of most single samples is not a number")

    strengths = torch.linalg.svdvals(present / present.norm(dim=0))
    if float(strengths[1] / strengths[0]) < alike:  # some may be the same sample, but not all
        raise AlikeError

    weights = torch.zeros(len(evidence.slices), dtype=torch.float64)
    solved = torch.linalg.lstsq(
        present,
        evidence.whole.unsqueeze(1),
        rcond=alike,
        driver="gelsd",
    )
    weights[is_present] = solved.solution[:, 0]

    return weights


def held_by(evidence: Evidence, proof: Proof) -> Proof:
    """A proof, as far as it holds for the slices of a larger batch."""
    assert proof.count is not None, "only a proof is held against more"
    deviations = {}
    for count in (proof.count, *proof.rivals):
        deviations[count] = evidence.deviation(evidence.weights_by(count))

    holding = [count for count, deviation in deviations.items() if deviation <= _HOLDS]
    if not holding:
        deviation = deviations[proof.count]
        samples = sample_count(evidence.batch, evidence.workload.split)
        reason = (
            f"what shows on few samples does not hold for {samples}: slices are {deviation:.2g} off"
        )

        return Proof(None, reason=reason, deviation=deviation)

    chosen, *rivals = holding
    return Proof(
        chosen,
        tuple(rivals),
        deviation=proof.deviation,
    )


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far one gradient is from another, by the size of the other."""
    return float((one - other).norm() / other.norm())
