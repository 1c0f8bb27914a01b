"""The one place that tells which exceptions mean that memory ran out."""

from __future__ import annotations

import re

import torch

from autofit.core.hardware import CUDA_MEMORY_ALLOCATION
from autofit.memory.tracker import BudgetExceededError

# PyTorch has no exception type for these: the CPU allocator raises a plain RuntimeError.
_OUT_OF_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory")
# What takes memory of the device beside torch's allocator, which leaves it none on a full card: libraries for their
# handles, and a kernel that is loaded when it is first used, by torch (cudaErrorMemoryAllocation) or by Triton.
_OUT_OF_DEVICE_MEMORY = re.compile(r"(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|Triton Error \[CUDA\]: out of memory")


def is_device_out_of_memory(error: BaseException) -> bool:
    """Whether the device's budget was exceeded, or the device is full."""
    if isinstance(error, torch.AcceleratorError):
        return bool(getattr(error, "error_code", None) == CUDA_MEMORY_ALLOCATION)
    found = isinstance(error, RuntimeError) and _OUT_OF_DEVICE_MEMORY.search(str(error))
    return bool(found) or isinstance(error, torch.OutOfMemoryError | BudgetExceededError)


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether the host could not give memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_HOST_MEMORY.search(str(error)))
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host."""
    return is_device_out_of_memory(error) or is_host_out_of_memory(error)
