"""A probe on the CPU: tensor storage is counted as it is allocated and freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autofit.core.measurement import PeakBytes
from autofit.core.workload import Workload
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.probe.limits import guard_cpu, peak_resident_bytes
from autofit.probe.steps import Probe, Request

_NEAR_MISS = 1.5  # a run over budget goes on up to here, so that the nearest miss can be told in bytes


class CpuProbe(Probe):
    """The peak of tensor storage decides, which is the same on every run; a resource limit only guards the machine.

    What compiles is watched through the allocator, which cannot stop a run that is far over budget: the guard does.
    """

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        limit = int(self.cap * _NEAR_MISS)
        self.watch: AllocationRecord | StorageTracker = (
            AllocationRecord() if self.compiles else StorageTracker(limit=limit)
        )
        guard_cpu(limit)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self.watch:
            yield

    def over_budget(self) -> bool:
        return self.watch.peak > self.cap

    def peak(self) -> PeakBytes:
        return PeakBytes(allocated=self.watch.peak, resident=peak_resident_bytes())
