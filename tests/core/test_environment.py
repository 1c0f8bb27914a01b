"""Environment: the user's settings stay, versions are reported, children die with their parent."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import autofit
from autofit.core.environment import ALLOCATOR, SETTINGS, allocator_variable, quiet_imports, set_defaults, versions
from tests.processes import number_in, wait_until_gone


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


def test_what_other_packages_could_not_load_is_not_the_users_to_mend(caplog: pytest.LogCaptureFixture) -> None:
    quiet_imports()
    logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so")
    logging.getLogger("torchao").warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_versions_name_what_a_result_depends_on() -> None:
    found = versions()
    assert found["autofit"] == autofit.__version__
    assert {"python", "torch", "transformers", "optuna"} <= found.keys()


FORK = """
import os, sys, time
from autofit.core.environment import die_with_parent
if os.fork() == 0:
    die_with_parent()
    with open(sys.argv[1], "w") as file:
        file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def test_a_child_is_killed_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path / "child")]) as parent:
        child = number_in(tmp_path / "child")
        parent.kill()
        parent.wait()
        wait_until_gone([child])
