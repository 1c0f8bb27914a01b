"""What is installed, and which compilers are asked for: each thing is looked up once in a process."""

import importlib.util
import shutil

import pytest

from autofit.setup import requirements


def test_each_module_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: asked.append(name))
    requirements.installed.cache_clear()
    assert not any(requirements.installed("no_such_module") for _ in range(3))
    assert asked == ["no_such_module"]
    requirements.installed.cache_clear()


def test_it_is_what_can_be_imported() -> None:
    assert requirements.installed("torch")
    assert not requirements.installed("no_such_module")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The compilers of a machine that has Triton, and names none in its environment."""
    has = {"gcc", "g++"}
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(requirements, "installed", lambda name: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in has else None)
    return has


def lacking(*devices: str) -> str | None:
    return requirements.no_compiler.__wrapped__(*devices)


def test_code_for_a_card_needs_a_c_compiler_and_code_for_a_cpu_one_of_cxx(
    machine: set[str],
) -> None:
    assert lacking("cuda", "cpu") is None
    machine.remove("g++")
    assert lacking("cuda") is None
    assert "Inductor needs a C++ compiler, and there is no g++;" in (lacking("cpu") or "")
    assert "and there is no g++;" in (lacking("cuda", "cpu") or "")
    machine.remove("gcc")
    assert "Triton needs a C compiler, and there is no gcc or clang;" in (
        lacking("cuda", "cpu") or ""
    )
    machine.add("clang")
    assert lacking("cuda") is None


def test_a_compiler_that_the_environment_names_is_the_one_that_is_taken(
    machine: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "icx")
    monkeypatch.setenv("CXX", "icpx")
    assert "CC names icx, which does not exist; install it or change CC" in (lacking("cuda") or "")
    assert "there is no icpx; install it or name another in CXX" in (lacking("cpu") or "")
    machine |= {"icx", "icpx"}
    assert lacking("cuda", "cpu") is None
