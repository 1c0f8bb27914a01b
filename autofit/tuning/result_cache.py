"""Results of earlier searches, cached by all they depend on: model, shape of the data, options,
machine.

Cached are the record and the journal, from which the run directory is written again: a result is
the same whether it was measured now or before.

The parent of probes does not touch the device, so the operating system's facts stand for the
machine.
"""

import contextlib
import dataclasses
import os
import platform
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.events import Notify
from autofit.core.files import (
    cache_file,
    cached_names,
    read_text,
    write_atomically,
    write_cache_text,
)
from autofit.core.hardware import GIB
from autofit.core.options import SearchOptions
from autofit.core.record import RECORD, Record
from autofit.core.result import Result
from autofit.core.run_directory import JOURNAL, RunDirectory, free_run_directory
from autofit.core.workload import Workload
from autofit.training.fingerprint import LAYOUT, cache_key, facts_of
from autofit.tuning.artifacts import write_run
from autofit.tuning.measurement_store import Store

# Options that do not change what is found.
_NO_INFLUENCE = {"out", "resume", "probe_timeout", "store", "workers", "memory_snapshot"}


def key_of(workload: Workload, options: SearchOptions) -> str:
    """The same for two searches that would measure the same, another for any change that could
    matter."""
    space = options.space
    if space and Path(space).is_file():  # a file counts by its content, a shipped space by its name
        space = Path(space).read_text(encoding="utf-8")

    machine = [
        platform.machine(),
        platform.processor(),
        psutil.cpu_count(logical=False),
        psutil.virtual_memory().total,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    ]
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    machine += [card.read_text(encoding="utf-8", errors="replace") for card in cards]

    return cache_key(
        facts_of(workload, workload.model()),
        keeps=workload.keeps,
        options=options.model_dump(mode="json", exclude=_NO_INFLUENCE),
        space=space,
        machine=machine,
        versions=versions(),
    )


@dataclasses.dataclass(frozen=True)
class Cached:
    """A search that was done before: its record, and the text of its journal."""

    record: Record
    journal: str

    def describe(self) -> str:
        """A sentence on it."""
        result = self.record.result
        assert result.best is not None, "no other is cached"
        unit = "tokens" if result.best.tokens_per_second else "samples"
        # The budget is named, since the default is what is free, today more or less.
        budget_gib = result.budget.device_bytes / GIB
        return (
            "a search for this model, data and machine was done before "
            f"({result.best.throughput:,.0f} {unit}/s measured within {budget_gib:.2f} GiB) "
            "and is used again"
        )

    def result(self) -> Result:
        """Its result, which names files only where its run directory is still there."""
        result = self.record.result
        if result.run_directory and Path(result.run_directory).is_dir():
            return result
        return dataclasses.replace(result, run_directory=None, files={})

    def write(self, out: Path, workload: Workload, notify: Notify) -> Result:
        """Write its run directory again, in the first free place at `out` unless this very search
        is there."""
        journal = out / JOURNAL
        if journal.is_file() and journal.read_bytes() == self.journal.encode():
            entered: AbstractContextManager[RunDirectory] = RunDirectory(out, resume=True)
        else:
            entered = free_run_directory(out)

        with entered as directory:
            write_atomically(directory.journal, self.journal)
            result = dataclasses.replace(self.record.result, files={})
            record = dataclasses.replace(self.record, result=result)
            return write_run(record, workload, directory, notify=notify)


def find(key: str) -> Cached | None:
    """The search cached under a key; None where there is none that can be read."""
    try:
        record = Record.load(cache_file("results", f"{key}.json"))
        journal = read_text(cache_file("results", f"{key}.log"))
    except (InputError, OSError, ValueError):
        return None

    if not record.intact or not record.result.best:
        return None
    return Cached(record, journal)


def save(key: str, result: Result) -> None:
    """Cache a search by the files of its run directory."""
    directory = Path(result.run_directory or "")
    for name, suffix in (RECORD, "json"), (JOURNAL, "log"):
        with contextlib.suppress(OSError):  # somebody deleted it: the search is done again
            write_cache_text(cache_file("results", f"{key}.{suffix}"), read_text(directory / name))


def outdated_note() -> str | None:
    """A sentence on what an older autofit left in the cache and this one does not read.

    None where there is nothing, and after the first time.
    """
    marker = cache_file("", "layout")
    with contextlib.suppress(OSError, ValueError):
        if read_text(marker).strip() == str(LAYOUT):
            return None

    unread = []
    for what, folder in (("results of searches", "results"), ("predictions", "estimates")):
        files = [name for name in cached_names(folder) if "." in name]
        if not all(name.startswith(f"v{LAYOUT}-") for name in files):
            unread.append(what)
    if Store().outdated():
        unread.append("measurements")

    write_cache_text(marker, f"{LAYOUT}\n")
    if not unread:
        return None
    return (
        f"{' and '.join(unread)} cached by an older autofit in {marker.parent} are not used: "
        "they are made anew."
    )
