"""A probe on a CUDA card: PyTorch's allocator counts, and is held to the budget."""

from __future__ import annotations

import torch

from autofit.core.hardware import GIB
from autofit.core.measurement import Outcome, PeakBytes
from autofit.core.workload import Workload
from autofit.memory import segments
from autofit.memory.device import used_bytes_without_context
from autofit.probe.limits import peak_resident_bytes
from autofit.probe.steps import Probe, Request


class CudaProbe(Probe):
    """The caching allocator under a hard cap, which fails where the smaller card would."""

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        self.used_by_others = used_bytes_without_context()
        segments.change(request.hardware.allocator)
        torch.cuda.init()
        self.total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, self.cap) / self.total), 0)
        torch.cuda.reset_peak_memory_stats()
        self.retries_before_timing = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def before_timing(self) -> None:
        self.retries_before_timing = self._retries()

    def over_budget(self) -> bool:
        return torch.cuda.max_memory_reserved() > self.cap

    def verdict(self) -> tuple[Outcome, str | None]:
        retries = self._retries() - self.retries_before_timing
        if retries:
            return Outcome.OUT_OF_MEMORY, f"the allocator had to empty its cache {retries} times in the timed steps"
        if peak_resident_bytes() > self.request.budget.host_bytes:
            return Outcome.HOST_OUT_OF_MEMORY, f"needs {peak_resident_bytes() / GIB:.2f} GiB of host memory"
        return super().verdict()

    def peak(self) -> PeakBytes:
        reserved = torch.cuda.max_memory_reserved()
        return PeakBytes(
            allocated=torch.cuda.max_memory_allocated(),
            reserved=reserved,
            device=reserved + max(self._context_bytes(), self.request.hardware.context_bytes),
            resident=peak_resident_bytes(),
        )

    def _context_bytes(self) -> int:
        """What this process holds beside the allocator; it grows as kernels are loaded, which the margin is for."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() - self.used_by_others

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
