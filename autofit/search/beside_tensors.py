"""What a card holds beside tensors: memory that its allocator reserves and no tensor fills, and the context, which
grows as kernels are loaded. Predictions are of tensors, budgets of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from autofit.core.hardware import MIB
from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array

Bytes = TypeVar("Bytes", float, Array)

# Medians of nine trainings on an H200 (benchmarks/results/gpu): reserved over allocated bytes, and by how much a
# context grows. They count as much as one measurement does.
_RESERVED, _GROWTH = 1.064, 148 * MIB
RESERVED_NOISE = 0.03  # of the logarithm of the first, between configs: seven of the nine lie within it


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
    """What these measurements tell, those that fit; `context_bytes`: of a context that is just open."""
    peaks = [each.peak_bytes for each in measurements if each.fits and each.peak_bytes]
    shares = [peak.reserved / peak.allocated for peak in peaks if peak.reserved and peak.allocated]
    contexts = [peak.device - peak.reserved for peak in peaks if peak.device and peak.reserved]
    return BesideTensors(median([_RESERVED, *shares]), median([context_bytes + _GROWTH, *contexts]))
