"""Environment: what the user has set stays."""

import pytest

from autofit.core.environment import ALLOCATOR, SETTINGS, allocator_variable, set_defaults


def test_only_what_is_not_set_is_set() -> None:
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    set_defaults(environment)
    assert environment == {**SETTINGS, "OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_allocator_is_the_users_by_whichever_name_it_was_set(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    set_defaults(environment)
    assert environment == {name: "max_split_size_mb:128", "OMP_WAIT_POLICY": "PASSIVE"}
    assert allocator_variable(environment) == name
    assert allocator_variable({}) is None
