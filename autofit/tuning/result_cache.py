"""Results of earlier searches, cached as result.yaml by all they depend on: model, shape of the data, options, machine.

The parent of probes does not touch the device, so the operating system's facts stand for the machine.
"""

import contextlib
import os
import platform
from pathlib import Path

import psutil

from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.files import cache_file, read_text, write_cache
from autofit.core.options import SearchOptions
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.training.fingerprint import LAYOUT, cache_key, facts_of
from autofit.tuning.measurement_store import Store

_NO_INFLUENCE = {"out", "resume", "probe_timeout", "store", "workers", "memory_snapshot"}  # on what is found


def key_of(workload: Workload, options: SearchOptions) -> str:
    """The same for two searches that would measure the same, another for any change that could matter."""
    own_space = Path(options.space) if options.space else None  # counts with its content, a shipped one by its name
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return cache_key(
        facts_of(workload, workload.model()),
        keeps=workload.keeps,
        options=options.model_dump(mode="json", exclude=_NO_INFLUENCE),
        space=own_space.read_text(encoding="utf-8") if own_space and own_space.is_file() else options.space,
        machine=[
            *(platform.machine(), platform.processor(), psutil.cpu_count(logical=False), psutil.virtual_memory().total),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            *(card.read_text(encoding="utf-8", errors="replace") for card in cards),
        ],
        versions=versions(),
    )


def find(key: str) -> Path | None:
    """The result.yaml cached under a key; None where there is none that can be read."""
    path = cache_file("results", f"{key}.yaml")
    try:
        saved = SavedResult.load(path)
    except InputError:
        return None
    return path if saved.measured.get("samples_per_second") and saved.hardware.get("budget_gib") else None


def save(key: str, text: str) -> None:
    """Cache a result.yaml."""
    write_cache(cache_file("results", f"{key}.yaml"), text)


def describe(saved: SavedResult) -> str:
    """A sentence on a cached result."""
    unit = "tokens" if saved.measured.get("tokens_per_second") else "samples"
    rate = saved.measured.get(f"{unit}_per_second")
    within = f"{saved.hardware['budget_gib']:.2f} GiB"  # the default is what is free, which today may be more or less
    measured = f"{rate:,.0f} {unit}/s measured within {within}"
    return f"a search for this model, data and machine was done before ({measured}) and is used again"


def outdated_note() -> str | None:
    """What an older autofit left in the cache and this one does not read: a sentence the first time, then None."""
    marker = cache_file("", "layout")
    with contextlib.suppress(OSError, ValueError):
        if read_text(marker).strip() == str(LAYOUT):
            return None
    folders = {"results of searches": "results", "predictions": "estimates"}
    files = {what: cache_file(folder, "").glob("*.*") for what, folder in folders.items()}
    unread = [what for what in files if any(not file.name.startswith(f"v{LAYOUT}-") for file in files[what])]
    unread += ["measurements"] if Store().outdated() else []
    write_cache(marker, f"{LAYOUT}\n")
    if not unread:
        return None
    return f"{' and '.join(unread)} cached by an older autofit in {marker.parent} are not used: they are made anew."
