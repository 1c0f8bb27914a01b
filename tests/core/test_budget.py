"""Budget: what tensors may take of it, and sizes as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.errors import InputError
from autofit.core.hardware import GIB


def test_the_cap_on_a_gpu_leaves_the_margin_and_the_context_out() -> None:
    budget = Budget(device_bytes=24 * GIB, host_bytes=GIB, margin=0.05)
    assert budget.cap_bytes("cuda", context_bytes=GIB) == int(24 * GIB * 0.95) - GIB
    assert budget.cap_bytes("cuda") == int(24 * GIB * 0.95)


def test_the_cap_on_the_cpu_is_the_budget() -> None:
    assert (
        Budget(device_bytes=GIB, host_bytes=GIB, margin=0.5).cap_bytes("cpu", context_bytes=5)
        == GIB
    )


@given(device=st.integers(1, 2**50), margin=st.floats(0, 0.99), context=st.integers(0, 2**30))
def test_the_cap_never_passes_the_budget(device: int, margin: float, context: int) -> None:
    assert Budget(device, 1, margin).cap_bytes("cuda", context) <= device


@given(peak=st.integers(1, 2**45), margin=st.floats(0, 0.9))
def test_the_budget_for_a_peak_just_holds_it(peak: int, margin: float) -> None:
    needed = Budget(1, 1, margin).bytes_for(peak, "cuda")
    assert Budget(needed, 1, margin).cap_bytes("cuda") == pytest.approx(peak, abs=2)
    assert Budget(1, 1, margin).bytes_for(peak, "cpu") == peak


@pytest.mark.parametrize("size", [0, -1])
def test_a_budget_of_nothing(size: int) -> None:
    with pytest.raises(InputError, match=f"a budget of {size} bytes holds nothing"):
        Budget(device_bytes=size, host_bytes=1)


@pytest.mark.parametrize("margin", [-0.1, 1, 5, float("nan")])
def test_a_margin_is_a_fraction(margin: float) -> None:
    with pytest.raises(InputError, match="is not a fraction"):
        Budget(device_bytes=1, host_bytes=1, margin=margin)


@pytest.mark.parametrize(
    ("given_size", "expected"), [(1, GIB), ("0.5", GIB // 2), (24.0, 24 * GIB), ("1e1", 10 * GIB)]
)
def test_sizes_in_gib(given_size: float | str, expected: int) -> None:
    assert gib_to_bytes(given_size) == expected


@pytest.mark.parametrize("size", [0, -1, "-2", float("nan"), "inf", "nan"])
def test_sizes_must_be_more_than_nothing(size: float | str) -> None:
    with pytest.raises(InputError, match="the GPU memory must be more than 0 GiB"):
        gib_to_bytes(size, "the GPU memory")


@pytest.mark.parametrize("size", ["24GB", "", None, [1]])
def test_sizes_must_be_numbers(size: object) -> None:
    with pytest.raises(InputError, match="the memory budget must be a number of GiB, not"):
        gib_to_bytes(size)


@pytest.mark.parametrize("size", [True, 1e300, 10**400])
def test_sizes_that_no_machine_has_are_one_sentence(size: float) -> None:
    with pytest.raises(
        InputError,
        match=r"must be (a number of|at most 1,073,741,824) GiB, not .{1,210}\. For example 24",
    ):
        gib_to_bytes(size)
