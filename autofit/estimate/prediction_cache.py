"""Predictions of whole spaces kept on disk, by what they depend on.

Only for models that a config.json describes: code of one's own may change without its structure showing it.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autofit.core.config import Config
from autofit.core.files import cache_file, digest, write_cache
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.rates import Rates

_CODE = Path(__file__).parents[1]
_VERSIONS = ("autofit", "torch", "transformers", "peft", "bitsandbytes", "torchao", "flash-attn")


def key_of(workload: Workload, hardware: Hardware, rates: Rates, configs: Sequence[Config]) -> str | None:
    """The same for two requests with one answer; None where that cannot be told."""
    described = getattr(workload.model, "config", None)
    if described is None or not workload.source or workload.loss or workload.count or workload.optimizer:
        return None
    facts: list[Any] = [
        dict(described),
        workload.summary(),
        [hardware.device, hardware.capability, hardware.here],
        [sorted(rates.matmul.items()), rates.bandwidth, rates.link, rates.launch_seconds, rates.pass_seconds],
        [_version(package) for package in _VERSIONS],
        max(file.stat().st_mtime_ns for file in _CODE.rglob("*.py")),  # a checkout changes without its version
        [list(config) for config in configs[:1]],  # canonical ones all have the same knobs, in this order
    ]
    values = "".join(repr(tuple(config.values())) for config in configs)  # of hundreds of thousands in a second
    return digest(json.dumps(facts, sort_keys=True, default=str) + values)


def read(key: str) -> tuple[list[float], list[float]] | None:
    """The (bytes, seconds) kept under a key."""
    try:
        nbytes, seconds = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or one that was cut off
        return None
    return nbytes, seconds


def keep_figures(key: str, nbytes: list[float], seconds: list[float]) -> None:
    """Keep figures for the next one who asks the same."""
    write_cache(_path(key), json.dumps([nbytes, seconds]))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _path(key: str) -> Path:
    return cache_file("estimates", f"{key}.json")
