"""Assertions in the contract's machinery are told as those of tests are, and nothing here waits for Inductor."""

import functools
import importlib.util

import pytest
import torch

pytest.register_assert_rewrite("contract")


@pytest.fixture(autouse=True)
def without_inductor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is captured whole as ever, but runs as captured: Inductor takes 40 s and more on two cores.

    Tests marked `slow` or `gpu` compile in earnest.
    """
    if request.node.get_closest_marker("slow") or request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    if importlib.util.find_spec("autofit.techniques.compile"):
        monkeypatch.setattr("autofit.techniques.compile.BACKEND", "aot_eager")
