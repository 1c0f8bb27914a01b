"""What a card holds beside tensors: memory that its allocator reserves and no tensor fills, and the
context, which grows as kernels are loaded. Predictions are of tensors, budgets of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from autofit.core.hardware import MIB
from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array

Bytes = TypeVar("Bytes", float, Array)

# Medians of nine trainings on an H200 (benchmarks/results/gpu): reserved over allocated bytes, and
# by how much a context grows. They count as much as one measurement does.
_RESERVED = 1.064
_GROWTH = 148 * MIB
RESERVED_NOISE = 0.03  # of log _RESERVED, between configs: seven of the nine lie within it


@dataclass(frozen=True)
class BesideTensors:
    """As measured in a search so far."""

    share: float  # of reserved bytes, by those of tensors
    context: float  # bytes

    def held(self, tensors: Bytes) -> Bytes:
        """All that a card holds when tensors take so many bytes."""
        return tensors * self.share + self.context

    def left(self, held: Bytes) -> Bytes:
        """The bytes of tensors when a card holds so many."""
        return (held - self.context) / self.share


def beside_tensors(measurements: Iterable[Measurement], context_bytes: int) -> BesideTensors:
    """What these measurements tell, those that fit.

    Args:
        context_bytes: of a context that was just opened.
    """
    shares = [_RESERVED]
    contexts: list[float] = [context_bytes + _GROWTH]
    for measurement in measurements:
        peak = measurement.peak_bytes
        if not measurement.fits or not peak or not peak.reserved:
            continue
        if peak.allocated:
            shares.append(peak.reserved / peak.allocated)
        if peak.device:
            contexts.append(peak.device - peak.reserved)

    return BesideTensors(median(shares), median(contexts))
