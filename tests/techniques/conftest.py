"""Assertions in the contract's machinery are told as those of tests are, and nothing here waits for Inductor."""

import functools

import pytest
import torch

from autofit.setup import requirements
from autofit.techniques import compile as compile_file

pytest.register_assert_rewrite("tests.techniques.contract")


@pytest.fixture(autouse=True)
def without_inductor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is captured whole as ever, but runs as captured: Inductor takes 40 s and more on two cores.

    Blocks are partitioned into a forward and a backward, too. What libraries compile (torchao: a function for each
    shape of weight) has no backward. Tests marked `slow` or `gpu` compile in earnest.
    """
    if request.node.get_closest_marker("slow") or request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compile_file, "BACKEND", "aot_eager")


@pytest.fixture(autouse=True)
def looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is remembered for a process, but tests change what there is."""
    for name in ("installed", "no_compiler"):
        monkeypatch.setattr(requirements, name, getattr(requirements, name).__wrapped__)
