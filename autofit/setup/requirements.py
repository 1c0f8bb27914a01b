"""What techniques need on a machine: packages, compilers and compute capability.

A search checks every config of a space, a hundred thousand times, so each look-up is cached for the
process.
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from autofit.core.hardware import Hardware


@functools.cache
def installed(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def missing(package: str) -> str | None:
    """For a message `... needs {}, or use ...`: the package and how to install it; None where it is
    installed."""
    if installed(package.replace("-", "_")):
        return None
    return f"{package}, which is not installed; pip install {package}"


def too_old(hardware: Hardware, needed: tuple[int, int]) -> str | None:
    """For a message `... needs {}; use ...`: the compute capability that this hardware is known to
    lack."""
    if not hardware.capability or hardware.capability >= needed:
        return None
    needs, has = (".".join(map(str, capability)) for capability in (needed, hardware.capability))
    return f"compute capability {needs}, {hardware.name} has {has}"


@functools.cache
def no_compiler(*devices: str) -> str | None:
    """For a message `{}, or use ...`: what is missing to compile for these kinds of device, and how
    to get it."""
    for device in devices:
        lacking = _no_c_compiler() if device == "cuda" else _no_cxx_compiler()
        if lacking:
            return lacking

    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        # The compiled code is loaded as a Python extension.
        return "the compiler needs Python's own header Python.h; install python3-dev"
    return None


def _no_c_compiler() -> str | None:
    """Triton builds its launchers with CC, where that is set, else with gcc or clang
    (runtime/build.py)."""
    if not installed("triton"):
        return "compiling for CUDA needs Triton, which is not installed; pip install triton"

    own = os.environ.get("CC")
    if own is not None and shutil.which(own) is None:
        return (
            f"Triton needs a C compiler, and CC names {own}, which does not exist; install it or "
            "change CC"
        )

    if own is None and not shutil.which("gcc") and not shutil.which("clang"):
        return (
            "Triton needs a C compiler, and there is no gcc or clang; install one or name it in CC"
        )
    return None


def _no_cxx_compiler() -> str | None:
    """Inductor builds CPU code with CXX, or g++ (its config.cpp.cxx)."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return (
            f"Inductor needs a C++ compiler, and there is no {compiler}; install it or name "
            "another in CXX"
        )
    return None
