"""A limit of the address space (`ulimit -v`) that is too low for what commands import."""

import resource

from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB

# With less, libraries fail in ways that nobody can catch: OpenBLAS tries for ever, or ends the
# process.
_LEAST = 1.5  # GiB, for PyTorch and transformers on a CPU


def check_address_space() -> None:
    """Raise a ProbeError where this process has too little address space to import PyTorch."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST * GIB:
        raise ProbeError(
            f"this process is limited to {limit / GIB:.2f} GiB of address space (ulimit -v), and "
            f"what it imports takes {_LEAST}.",
            "Raise that limit.",
        )
