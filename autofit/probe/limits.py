"""Hard limits on a probe, and the one place that tells which exceptions mean that memory ran out."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from autofit.core.hardware import GIB
from autofit.memory.tracker import BudgetExceededError

# PyTorch has no exception type for these: the CPU allocator raises a plain RuntimeError.
_OUT_OF_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory")
_GUARD_SLACK = 1.25  # kernels and libraries use memory that no tensor shows


def guard_cpu(budget_bytes: int) -> None:
    """Bound this process's data segment well above the budget: a guard for the machine, not the verdict.

    Near such a limit the outcome of a run was measured not to be repeatable; the verdict is the tracker's.
    """
    limit = _status_bytes("VmData") + int(budget_bytes * _GUARD_SLACK) + GIB
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def is_device_out_of_memory(error: BaseException) -> bool:
    """Whether the device's budget was exceeded."""
    return isinstance(error, torch.OutOfMemoryError | BudgetExceededError)


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether the host could not give memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_HOST_MEMORY.search(str(error)))
    )


def peak_resident_bytes() -> int:
    """The largest resident set of this process since it was forked."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
