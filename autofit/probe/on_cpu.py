"""A probe on the CPU: tensor storage is counted as it is allocated and freed."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autofit.core.hardware import GIB
from autofit.core.measurement import PeakBytes
from autofit.core.workload import Workload
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.probe.steps import Probe, Request, peak_resident_bytes

_NEAR_MISS = 1.5  # a run over budget goes on up to here, so that the nearest miss has a size
_GUARD_SLACK = 1.25  # kernels and libraries use memory that no tensor shows


class CpuProbe(Probe):
    """The peak of tensor storage decides: it is the same on every run.

    A resource limit only guards the machine. Compiled steps are watched through the allocator,
    which cannot stop a run far over budget; the guard does.
    """

    watch: AllocationRecord | StorageTracker

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        limit = int(self.cap * _NEAR_MISS)
        if self.compiles:
            self.watch = AllocationRecord()
        else:
            self.watch = StorageTracker(limit=limit)
            self.watch.passed = self.cap, self.note_shortage
        guard_cpu(limit)

    def live(self) -> Callable[[], int] | None:
        watch = self.watch
        if isinstance(watch, StorageTracker):
            return lambda: watch.live
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self.watch:
            yield

    def begins_small(self) -> bool:
        # Compiled code would be made for few samples. An allocator that caches would be left with
        # other blocks.
        return not self.compiles

    def over_budget(self) -> bool:
        return self.watch.peak > self.cap

    def peak(self) -> PeakBytes:
        return PeakBytes(allocated=self.watch.peak, resident=peak_resident_bytes())


def guard_cpu(budget_bytes: int) -> None:
    """Bound this process's data segment well above the budget: a guard for the machine, not the
    verdict.

    Near such a limit the outcome of a run was measured not to be repeatable; the verdict is the
    tracker's.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^VmData:\s*(\d+)", status, re.MULTILINE)
    if found is None:
        raise OSError("/proc/self/status has no VmData")

    taken = int(found[1]) * 1024
    limit = taken + int(budget_bytes * _GUARD_SLACK) + GIB
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
