"""Results of earlier searches, found again by what they depend on: model, shape of the data, options, machine.

Only what `fit` would find by measuring again is stored, as the result.yaml it has; weights are no part of it. The
parent of probes does not touch the device, so the machine is told by what the system says of it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from autofit import techniques
from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.files import cache_file, digest, write_cache
from autofit.core.options import SearchOptions
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.training.fingerprint import Code, facts_of

_NOT_WHAT_IS_FOUND = {"out", "resume", "probe_timeout", "store", "workers", "memory_snapshot"}


def key_of(workload: Workload, options: SearchOptions) -> str:
    """The same for two searches that would measure the same; another for any change that could matter."""
    code = Code()
    facts = {
        **facts_of(workload, workload.model()),
        "keeps": workload.keeps,
        "options": options.model_dump(mode="json", exclude=_NOT_WHAT_IS_FOUND),
        "space": _space_text(options.space),
        "knobs": [code.of(type(each)) for each in techniques.added_techniques()],
        "machine": list(_machine()),
        "versions": versions(),
    }
    return digest(json.dumps(facts, sort_keys=True, default=str))


def find(key: str) -> Path | None:
    """The result.yaml stored under a key; None where there is none that can be read."""
    try:
        SavedResult.load(_path(key))
    except InputError:
        return None
    return _path(key)


def keep(key: str, text: str) -> None:
    """Store a result.yaml."""
    write_cache(_path(key), text)


def describe(saved: SavedResult) -> str:
    """A stored result in a sentence."""
    rate = saved.measured.get("tokens_per_second") or saved.measured.get("samples_per_second")
    unit = "tokens/s" if saved.measured.get("tokens_per_second") else "samples/s"
    within = f"{saved.hardware['budget_gib']:.2f} GiB"  # the default is what is free, which today may be more or less
    measured = f"{rate:,.0f} {unit} measured within {within}"
    return f"a search for this model, data and machine was done before ({measured}) and is used again"


def _path(key: str) -> Path:
    return cache_file("results", f"{key}.yaml")


def _space_text(space: str | None) -> str | None:
    """What a space of one's own says now; a shipped one is told by its name and autofit's version."""
    own = Path(space) if space else None
    return own.read_text(encoding="utf-8") if own and own.is_file() else space


def _machine() -> Iterator[Any]:
    yield platform.machine(), platform.processor(), psutil.cpu_count(logical=False), psutil.virtual_memory().total
    yield os.environ.get("CUDA_VISIBLE_DEVICES")
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        yield card.read_text(encoding="utf-8", errors="replace")
