"""A probe on a CUDA card: PyTorch's allocator counts, and is held to the budget together with what
lies beside it."""

import ctypes
from collections.abc import Callable

import torch

from autofit.core.budget import Budget
from autofit.core.errors import ProbeError, pluralize
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.measurement import Outcome, PeakBytes
from autofit.core.workload import Workload
from autofit.hardware import segments
from autofit.hardware.device import END_OTHERS, opening
from autofit.probe.steps import Probe, Request, peak_resident_bytes
from autofit.setup import Setup
from autofit.training.step import train_step

# What kernels and workspaces of a process add to its context at most; communicators as much again.
_MOST_BESIDE = 2 * GIB
# The size of a context differs between processes, and what a desktop takes changes.
_UNEVEN = 256 * MIB
_OTHERS = "others use the card, so an out-of-memory there proves nothing"


def open_card() -> int:
    """Free bytes beside a context, made by the computation that it was measured with.

    Raises ProbeError for a full card.
    """
    with opening():
        _compute()
        return torch.cuda.mem_get_info(0)[0]


def _compute() -> None:
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def require_free_memory(free_bytes: int, budget: Budget, hardware: Hardware) -> None:
    """Raise a ProbeError unless a card's free bytes cover the budget: else running out of them says
    nothing."""
    cap = budget.cap_bytes(hardware.device, hardware.context_bytes)
    if free_bytes < cap - _UNEVEN:
        raise ProbeError(
            f"{_OTHERS}: {free_bytes / GIB:.1f} GiB of the card are free where the budget lets "
            f"tensors take {cap / GIB:.1f}.",
            END_OTHERS,
        )


class CudaProbe(Probe):
    """The caching allocator under a hard cap, which fails where the smaller card would.

    Memory beside the allocator counts too: its growth in the first steps lowers the cap of the
    timed ones. Managed memory (`pages`) is not counted, since it gives way: there the card is made
    as small as the budget instead.
    """

    def __init__(self, workload: Workload, request: Request) -> None:
        super().__init__(workload, request)
        segments.change(request.hardware.allocator)
        self.free_bytes = open_card()
        self.total = torch.cuda.get_device_properties(0).total_memory
        self.context = request.hardware.context_bytes
        self.built_peak: PeakBytes | None = None
        self.retries_before_timing = 0
        self._allow(self.cap)
        torch.cuda.reset_peak_memory_stats(0)

    def _allow(self, cap: int) -> None:
        self.cap = cap
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, cap) / self.total), 0)

    def prepare(self) -> Setup:
        """As a Probe does; with pages, the card's memory above the budget is occupied first.

        So pages move to the host where a smaller card's would. Counting them against the budget
        would call every such config too large: they take all that is free, and fit nonetheless.
        Refusing them would keep them from the cards that they are made for.
        """
        allowed = self.request.budget.device_bytes - self.request.hardware.context_bytes
        if self.pages and self.free_bytes > allowed:
            _hold(self.free_bytes - allowed)
        return super().prepare()

    def built(self) -> None:
        super().built()
        self._update_context()
        self.built_peak = self.peak()

    def live(self) -> Callable[[], int] | None:
        return lambda: torch.cuda.memory_allocated(0)

    def warmed_up(self, setup: Setup) -> None:
        """Run one more step where the peak so far is not that of later steps.

        Compiling tries kernels on buffers of its own; and what was reserved before may exceed the
        lowered cap unused.
        """
        self.synchronize()
        self._update_context()
        self._allow(self.usable - self.context)

        is_other = self.compiles or torch.cuda.max_memory_reserved(0) > self.cap
        if any(setup.ranks.largest(is_other)):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(0)
            train_step(setup, self.part(setup, 2))
        self.retries_before_timing = self._retries()

    def _update_context(self) -> None:
        """Measure what this process holds beside the allocator; it grows as kernels are loaded."""
        if self.pages:
            return  # pages would count as context
        self.context = self.request.hardware.context_bytes + max(0, self._beside())

    def _beside(self) -> int:
        """What is gone of the card, beside what the allocator has, since this process opened it."""
        return self.free_bytes - torch.cuda.mem_get_info(0)[0] - torch.cuda.memory_reserved(0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def over_budget(self) -> bool:
        return self.peak().held_bytes > self.usable

    def verdict(self) -> tuple[Outcome, str | None]:
        retries = self._retries() - self.retries_before_timing
        if retries:
            times = pluralize(retries, "time")
            reason = f"the allocator had to empty its cache {times} in the timed steps"
            return Outcome.OUT_OF_MEMORY, reason

        resident = peak_resident_bytes()
        if resident > self.request.budget.host_bytes:
            return Outcome.HOST_OUT_OF_MEMORY, f"needs {resident / GIB:.2f} GiB of host memory"

        return super().verdict()

    def peak(self) -> PeakBytes:
        """Peaks of the allocator, and the context.

        Nothing asks the device: it is dead after an assert in a kernel.
        """
        reserved = torch.cuda.max_memory_reserved(0)
        peak = PeakBytes(
            torch.cuda.max_memory_allocated(0),
            reserved,
            device=reserved + self.context,
            resident=peak_resident_bytes(),
        )
        return peak.larger(self.built_peak) if self.built_peak else peak

    def check_free_memory(self) -> None:
        hardware = self.request.hardware
        require_free_memory(self.free_bytes, self.request.budget, hardware)
        if self.pages:
            return

        beside = self._beside()
        most = 2 * _MOST_BESIDE if hardware.world > 1 else _MOST_BESIDE
        if beside > most:
            raise ProbeError(
                f"{_OTHERS}: {beside / GIB:.1f} GiB of the card were taken beside its tensors "
                "while it ran.",
                END_OTHERS,
            )

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(0).get("num_alloc_retries", 0))


def _hold(nbytes: int) -> None:
    """Occupy memory of the card until this process ends.

    By the runtime's own function, which PyTorch loads for all to see: PyTorch's allocator would
    count it as tensors. It is plain memory, since managed memory would give way itself.

    Raises ProbeError where the card does not give it.
    """
    allocate = getattr(ctypes.CDLL(None), "cudaMalloc", None)
    if allocate is None or allocate(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes)):
        raise ProbeError(
            f"{nbytes / GIB:.1f} GiB of the card, the part above the budget, could not be set "
            "aside."
        )
