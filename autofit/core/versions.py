"""Versions that a result depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import autofit

REPORTED_PACKAGES = (
    *("torch", "transformers", "peft", "bitsandbytes", "torchao", "optuna"),
    *("triton", "liger-kernel", "flash-attn"),  # on CUDA only, where they are installed
)


@functools.cache
def versions() -> dict[str, str]:
    """By package, with autofit's and Python's."""
    found = {"autofit": autofit.__version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # optional on some machines, and then it took no part
    return found
