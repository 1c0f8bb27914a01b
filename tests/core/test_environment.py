"""Environment: the user's settings stay, versions are reported."""

import logging

import pytest

import autofit
from autofit.core.environment import (
    ALLOCATOR,
    SETTINGS,
    allocator_variable,
    quiet_imports,
    set_defaults,
    versions,
)


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


def test_what_other_packages_could_not_load_is_not_the_users_to_mend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet_imports()
    logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so")
    logging.getLogger("torchao").warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_versions_name_what_a_result_depends_on() -> None:
    found = versions()
    assert found["autofit"] == autofit.__version__
    assert {"python", "torch", "transformers", "optuna"} <= found.keys()
