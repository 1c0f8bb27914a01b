"""What the real parts of techniques need on a machine: packages and compilers.

A search asks for every config of a space, a hundred thousand times; each thing is looked up once in a process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


@functools.cache
def installed(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def no_compiler(*devices: str) -> str | None:
    """What is lacking to compile for some kinds of device, and what to install, to be ended with `, or use ...`."""
    for device in devices:
        if lacking := _no_c_compiler() if device == "cuda" else _no_cxx_compiler():
            return lacking
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        # What the compiler makes is loaded as a Python extension.
        return "the compiler needs Python's own header Python.h; install python3-dev"
    return None


def _no_c_compiler() -> str | None:
    """Triton builds what launches its kernels with CC, where that is set, else with gcc or clang (runtime/build.py)."""
    if not installed("triton"):
        return "compiling for CUDA needs Triton, which is not installed; pip install triton"
    own = os.environ.get("CC")
    if own is not None and shutil.which(own) is None:
        return f"Triton needs a C compiler, and there is no {own}, which CC names; install it or name another in CC"
    if own is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is no gcc or clang; install one or name it in CC"
    return None


def _no_cxx_compiler() -> str | None:
    """Inductor builds what it computes on a CPU with CXX, or g++ (its config.cpp.cxx)."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"Inductor needs a C++ compiler, and there is no {compiler}; install it or name another in CXX"
    return None
