"""Which errors mean that memory ran out."""

from collections.abc import Callable

import pytest
import torch
from torch._inductor.exc import InductorError

from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Outcome
from autofit.hardware.out_of_memory import (
    is_device_out_of_memory,
    is_host_out_of_memory,
    outcome_of_last_words,
)
from autofit.hardware.tracker import BudgetExceededError

NO_HOST = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED")


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


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Makes a card answer that so many bytes are free; None: that it answers no more."""

    def set_free(nbytes: int | None) -> None:
        def get_info() -> tuple[int, int]:
            if nbytes is None:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return nbytes, 80 * GIB

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", get_info)

    return set_free


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error(2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        # segments that grow, and Inductor's launcher
        RuntimeError("CUDA driver error: out of memory"),
        # of functions that lose the type
        RuntimeError("CUDA error: out of memory\nSearch for ..."),
    ],
    ids=str,
)
def test_what_is_taken_of_the_device_beside_the_allocator_can_fail_too(error: Exception) -> None:
    assert is_device_out_of_memory(error)
    assert not is_host_out_of_memory(error)


def test_a_compilers_wrapper_is_looked_through() -> None:
    for inner, expected in (
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (ValueError("no"), False),
    ):
        assert is_device_out_of_memory(InductorError(inner, None)) is expected
    assert is_host_out_of_memory(InductorError(MemoryError(), None))


def test_too_little_shared_memory_is_not_out_of_memory() -> None:
    """As Inductor's launcher says it, whose remedy is another kernel."""
    error = torch.OutOfMemoryError(
        "out of resource: triton_mm Required: 262144 Hardware limit:232448 Reducing block"
    )
    assert not is_device_out_of_memory(error)


def test_an_illegal_address_is_not_out_of_memory() -> None:
    assert not is_device_out_of_memory(accelerator_error(700))
    assert not is_host_out_of_memory(accelerator_error(700))


@pytest.mark.parametrize(
    ("nbytes", "full"),
    [(10 * MIB, True), (GIB, False), (None, False)],
    ids=["full", "with room", "ended"],
)
def test_no_handle_of_cublas_is_out_of_memory_on_a_full_card_only(
    free: Callable[[int | None], None], nbytes: int | None, full: bool
) -> None:
    error = RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    )
    assert not is_device_out_of_memory(error)  # no card was opened
    free(nbytes)
    assert is_device_out_of_memory(error) is full
    assert not is_host_out_of_memory(error)


@pytest.mark.parametrize(
    ("nbytes", "of_the_host"),
    [(10 * MIB, False), (8 * GIB, True), (None, False)],
    ids=["full", "with room", "ended"],
)
def test_an_allocation_that_fails_beside_a_card_with_room_was_of_pinned_memory(
    free: Callable[[int | None], None], nbytes: int | None, of_the_host: bool
) -> None:
    free(nbytes)
    assert is_host_out_of_memory(accelerator_error(2)) is of_the_host
    assert is_device_out_of_memory(accelerator_error(2)) is not of_the_host


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("Error out of memory at line 77 in file /src/csrc/ops.cu", Outcome.OUT_OF_MEMORY),
        (
            "Error out of memory at line 559 in file /src/csrc/pythonInterface.cpp",
            Outcome.HOST_OUT_OF_MEMORY,
        ),
        (
            "Error an illegal memory access was encountered at line 77 in file /src/csrc/ops.cu",
            Outcome.FAILED,
        ),
        ("said: Error out of memory at line 77 in file /src/csrc/ops.cu", None),
        ("out of memory", None),
        ("", None),
    ],
)
def test_what_bitsandbytes_says_before_it_ends_the_process(
    line: str, outcome: Outcome | None
) -> None:
    verdict = outcome_of_last_words(line)
    assert (verdict and verdict[0]) == outcome


def test_the_kinds_of_out_of_memory_are_distinguished() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), BudgetExceededError()):
        assert is_device_out_of_memory(error)
        assert not is_host_out_of_memory(error)
    for error in (MemoryError(), too_much(), OSError(12, "Cannot allocate memory"), NO_HOST):
        assert is_host_out_of_memory(error)
        assert not is_device_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), OSError("no such file"), ValueError("memory")]
)
def test_other_errors_are_none_of_them(error: Exception) -> None:
    assert not is_device_out_of_memory(error)
    assert not is_host_out_of_memory(error)
