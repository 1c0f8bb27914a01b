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
def no_compiler(device: str) -> str | None:
    """What Inductor lacks to compile for a device, and what to install, to be ended with `, or use ...`."""
    if device == "cuda":
        if not installed("triton"):
            return "compiling for CUDA needs Triton, which is not installed; pip install triton"
        if not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "gcc", "clang")):
            return "Triton needs a C compiler, and there is no gcc or clang; install one or name it in CC"
    else:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"Inductor needs a C++ compiler, and there is no {compiler}; install it or name another in CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        # What the compiler makes is loaded as a Python extension.
        return "the compiler needs Python's own header Python.h; install python3-dev"
    return None
