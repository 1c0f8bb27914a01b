"""Hard limits on a probe, and what its process used."""

from __future__ import annotations

import resource
from pathlib import Path

from autofit.core.hardware import GIB

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


def peak_resident_bytes() -> int:
    """The largest resident set of this process since it was forked."""
    # Not VmHWM of /proc/self/status, which gVisor's kernel does not tell.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
