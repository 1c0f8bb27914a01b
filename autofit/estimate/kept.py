"""Predictions of whole spaces kept on disk, by what they depend on.

Only for models that a config.json describes: code of one's own may change without its structure showing it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.rates import Rates
from autofit.estimate.scaling import Floats

_VERSIONS = ("autofit", "torch", "transformers", "peft", "bitsandbytes", "torchao")


def key_of(workload: Workload, hardware: Hardware, rates: Rates, configs: Sequence[Config]) -> str | None:
    """The same for two requests with one answer; None where that cannot be told."""
    described = getattr(workload.model, "config", None)
    if described is None or not workload.source or workload.loss or workload.count or workload.optimizer:
        return None
    digest = hashlib.sha256()
    for config in configs:
        digest.update(repr(sorted(config.items())).encode())
    facts: list[Any] = [
        dict(described),
        workload.summary(),
        [hardware.device, hardware.capability],
        [sorted(rates.matmul.items()), rates.bandwidth, rates.link, rates.launch_seconds],
        [_version(package) for package in _VERSIONS],
        digest.hexdigest(),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def read(key: str) -> tuple[Floats, Floats] | None:
    """The (bytes, seconds) kept under a key."""
    try:
        with np.load(_path(key)) as kept:
            return kept["allocated"], kept["seconds"]
    except (OSError, ValueError, KeyError):  # none yet, or one that was cut off
        return None


def keep(key: str, allocated: Floats, seconds: Floats) -> None:
    """Keep figures; a cache that cannot be written is no reason to fail."""
    path = _path(key)
    aside = path.with_suffix(f".{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(aside, allocated=allocated, seconds=seconds)
        aside.replace(path)
    except OSError:
        return


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _path(key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autofit" / "estimates" / f"{key}.npz"
