"""A sure no before anything heavy is imported, and never a no that PyTorch would not say as well."""

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

from autofit.hardware import driver
from autofit.hardware.driver import no_gpu_note, why_no_gpu


@pytest.mark.parametrize(
    ("build", "has_driver", "expected"),
    [
        ({"cuda": "13.0"}, False, "there is no GPU on this machine"),
        ({"cuda": None}, False, "there is no GPU on this machine"),
        ({"cuda": None}, True, "this PyTorch was built without CUDA, and can use no GPU"),
        ({"cuda": "13.0"}, True, None),
        ({"cuda": None, "hip": "7.0"}, False, None),
        ({"cuda": None, "xpu": "2026"}, False, None),
    ],
    ids=str,
)
def test_the_reason_follows_from_build_and_driver(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], has_driver: bool, expected: str | None
) -> None:
    def load(name: str) -> None:
        assert name == "libcuda.so.1"
        if not has_driver:
            raise OSError("cannot open shared object file")

    monkeypatch.setattr(driver, "_build", lambda: build)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert why_no_gpu() == expected


def test_the_build_is_read_from_the_installed_torch() -> None:
    assert driver._build()["cuda"] == torch.version.cuda


def test_a_no_is_pytorchs_own_and_found_without_importing_it() -> None:
    code = (
        "from autofit.hardware.driver import why_no_gpu; why = "
        "why_no_gpu(); import sys; print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )
    if why_no_gpu() is not None:
        assert not torch.cuda.is_available()


def test_the_sentence() -> None:
    assert no_gpu_note("there is no GPU on this machine").startswith(
        "There is no GPU on this machine, so nothing can"
    )
