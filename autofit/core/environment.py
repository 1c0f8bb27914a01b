"""What a process runs under: environment variables (also train.py's), versions, logging."""

import functools
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import autofit

# Where segments of memory cannot grow, 8B QLoRA reserves 3.8 % more, of a margin of 5 %.
EXPANDABLE = "expandable_segments:True"
FIXED = "expandable_segments:False"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
# The names that PyTorch reads where that one is not set.
_OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# By default the threads of OpenMP spin while they wait: beside busy processes on two cores that
# made a step up to 18 times slower (10.2 s against 0.57 s). Read when torch is loaded, as is the
# setting of the allocator.
SETTINGS = {ALLOCATOR: EXPANDABLE, "OMP_WAIT_POLICY": "PASSIVE"}

REPORTED_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "diffusers",  # where it is installed
    "optuna",
    "triton",  # this and the next two on CUDA only, where they are installed
    "liger-kernel",
    "flash-attn",
)

# By logger: warnings at import about missing cards or kernels, which no user can act on.
_IMPORT_WARNINGS = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, by whichever name."""
    for name, value in SETTINGS.items():
        if name != ALLOCATOR or allocator_variable(environment) is None:
            environment.setdefault(name, value)


def importing_alike() -> dict[str, str]:
    """This process's environment, for a `python -P` that imports from where this does, only."""
    # "" is the current directory, which `python -m` and `python -c` put first unless they get -P,
    # so that a types.py or a yaml.py lying there would be run.
    paths = (path or str(Path.cwd()) for path in sys.path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def allocator_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that sets PyTorch's allocator; None where none does."""
    for name in (ALLOCATOR, *_OLDER_NAMES):
        if name in environment:
            return name
    return None


def quiet_imports() -> None:
    """Drop import-time warnings that no user can act on."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return _IMPORT_WARNINGS[record.name] not in record.getMessage()

    for logger in _IMPORT_WARNINGS:
        logging.getLogger(logger).addFilter(is_wanted)


def version_of(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Versions a result depends on: autofit's, Python's and those of the installed packages."""
    found = {"autofit": autofit.__version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        version = version_of(package)
        if version:
            found[package] = version
    return found
