"""The one place that decides which exceptions mean that memory ran out."""

import re

import torch

from autofit.core.errors import message_of
from autofit.core.hardware import CUDA_MEMORY_ALLOCATION, GIB, MIB
from autofit.core.measurement import Outcome
from autofit.hardware.tracker import BudgetExceededError

# PyTorch has no exception type for these: the CPU allocator raises a plain RuntimeError.
_OUT_OF_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"
)
# Device memory outside torch's allocator, which leaves none on a full card: handles of libraries,
# and kernels loaded on first use, by torch ("CUDA error", where its type is lost), by Triton or by
# Inductor's launcher ("CUDA driver error", which the allocator also says where it lets its segments
# grow), and what NCCL takes ("Cuda failure 2").
_OUT_OF_DEVICE_MEMORY = re.compile(
    r"CU[A-Z]+_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"
    r"|(Triton Error \[CUDA\]|CUDA error|CUDA driver error): out of memory|Cuda failure (\d+ )?'out of memory'"
)
# cuBLAS says this where there is no room for its handle, and also on a device that another error
# has ended. Its handle takes some 10 to 100 MiB, so with more than that free something else is
# wrong.
_NO_HANDLE = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create\(")
_ROOM_FOR_A_HANDLE = 256 * MIB
# The runtime has one code for the device's memory and for pinned memory of the host. What it takes
# of the device by itself is small: a kernel, or what kernels spill.
_ROOM_FOR_A_KERNEL = GIB
# CUDA's allocator rounds to two digits of the largest unit (format_size), that of the CPU tells
# bytes.
_ASKED = re.compile(r"[Tt]ried to allocate (?P<size>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}
# Inductor raises the same type for a kernel that asks for more shared memory than a multiprocessor
# has.
_SHARED_MEMORY = "out of resource"
# bitsandbytes prints this before it ends the process with exit(1). Its pythonInterface allocates
# managed memory, which is the host's.
_BITSANDBYTES = re.compile(r"^Error (?P<error>.+) at line \d+ in file (?P<file>\S+)$")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host."""
    return is_device_out_of_memory(error) or is_host_out_of_memory(error)


def is_device_out_of_memory(error: BaseException) -> bool:
    """Whether the device's budget was exceeded, or the device is full."""
    error = _unwrapped(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _SHARED_MEMORY not in str(error)
    if isinstance(error, torch.AcceleratorError):
        return _is_allocation(error) and not _is_pinned_memory(error)
    text = message_of(error) if isinstance(error, RuntimeError) else ""
    if _NO_HANDLE.search(text):
        free = _free_bytes()
        return free is not None and free < _ROOM_FOR_A_HANDLE
    return isinstance(error, BudgetExceededError) or bool(_OUT_OF_DEVICE_MEMORY.search(text))


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether the host could not give memory."""
    error = _unwrapped(error)
    if isinstance(error, torch.AcceleratorError):
        return _is_pinned_memory(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError)
        and bool(_OUT_OF_HOST_MEMORY.search(message_of(error)))
    )


def asked_bytes(error: BaseException) -> int | None:
    """The allocation that failed, where the error names it, as PyTorch's do."""
    found = _ASKED.search(message_of(_unwrapped(error)))
    if found is None:
        return None
    return int(float(found["size"]) * _UNITS[found["unit"]])


def outcome_of_last_words(line: str) -> tuple[Outcome, str] | None:
    """Outcome and reason from the last line of a process that ended with exit(1); None unless
    bitsandbytes wrote it."""
    match = _BITSANDBYTES.match(line)
    if match is None:
        return None
    if match["error"] != "out of memory":
        return Outcome.FAILED, f"bitsandbytes ended the process: {match['error']}"
    if "pythonInterface" in match["file"]:
        return (
            Outcome.HOST_OUT_OF_MEMORY,
            "bitsandbytes could not get the host's memory for paged state",
        )
    return Outcome.OUT_OF_MEMORY, "bitsandbytes ended the process: out of memory"


def _unwrapped(error: BaseException) -> BaseException:
    """The backend's own exception, where torch.compile has wrapped it."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner
    return error


def _is_allocation(error: BaseException) -> bool:
    return bool(getattr(error, "error_code", None) == CUDA_MEMORY_ALLOCATION)


def _is_pinned_memory(error: BaseException) -> bool:
    """Whether an allocation failed although the device had room."""
    free = _free_bytes() if _is_allocation(error) else None
    return free is not None and free >= _ROOM_FOR_A_KERNEL


def _free_bytes() -> int | None:
    """Free memory of the device; None where it has not been opened, or no longer answers."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return torch.cuda.mem_get_info()[0]
    except RuntimeError:  # after an illegal address or an assert in a kernel
        return None
