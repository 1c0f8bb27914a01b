"""Which errors mean that memory ran out."""

import pytest
import torch

from autofit.memory.out_of_memory import is_device_out_of_memory, is_host_out_of_memory
from autofit.memory.tracker import BudgetExceededError


def too_much() -> Exception:
    """What PyTorch's CPU allocator raises in fact: a plain RuntimeError."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


def accelerator_error(code: int) -> Exception:
    """As CUDA's own calls fail, outside of torch's allocator."""
    error = torch.AcceleratorError("CUDA error: whatever it says")
    error.error_code = code
    return error


def test_what_is_taken_of_the_device_beside_the_allocator_can_fail_too() -> None:
    full = [
        accelerator_error(2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ]
    for error in full:
        assert is_device_out_of_memory(error)
        assert not is_host_out_of_memory(error)
    assert not is_device_out_of_memory(accelerator_error(700))  # an illegal address


def test_each_kind_of_out_of_memory_is_told_from_the_other() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), BudgetExceededError()):
        assert is_device_out_of_memory(error)
        assert not is_host_out_of_memory(error)
    for error in (MemoryError(), too_much(), OSError(12, "Cannot allocate memory")):
        assert is_host_out_of_memory(error)
        assert not is_device_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), OSError("no such file"), ValueError("memory")])
def test_other_errors_are_none_of_them(error: Exception) -> None:
    assert not is_device_out_of_memory(error)
    assert not is_host_out_of_memory(error)
