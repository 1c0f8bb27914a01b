"""What earlier searches measured of a workload on this machine, for a search to start from, and where its own is kept.

Joins the store with the search. Neither is worth a search that fails: what goes wrong is told once, and then the search
goes on with nothing known and nothing kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.environment import SETTINGS
from autofit.core.errors import StoreError, counted
from autofit.core.files import digest
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.search import PriorMeasurement, prior_measurement
from autofit.training.fingerprint import Code
from autofit.tuning.measurement_store import Store, Stored, Subject

_PACKAGE = Path(__file__).parents[1]
_MEASURING = (
    "data",
    "hardware",
    "probe",
    "setup",
    "techniques",
    "training",
)  # the rooms whose code decides what is measured
_CHOOSING = ("python", "optuna")  # versions of what takes no part in a training step


def subject_of(workload: Workload, hardware: Hardware, versions: Mapping[str, str]) -> Subject | None:
    """What measurements of this workload on this machine are found by; None where it cannot be told from others.

    Args:
        hardware: that is measured on, not that it stands for.
        versions: of packages.
    """
    fingerprint = workload.traits.fingerprint if workload.traits else None
    if fingerprint is None:
        return None
    device = {
        "device": hardware.device,
        "name": hardware.name,
        "memory_gib": round(hardware.memory_bytes / GIB),  # the last bytes change with the kernel
        "capability": hardware.capability,
        "cores": hardware.cores,
        "allocator": hardware.allocator,
        "environment": {name: os.environ.get(name, default) for name, default in SETTINGS.items()},
    }
    code = Code()
    added = [code.of(type(each)) for each in techniques.added_techniques()]
    measuring = {name: version for name, version in versions.items() if name not in _CHOOSING}
    measuring |= (
        {"code": _own_code(), "knobs": digest(json.dumps(added, default=str))} if added else {"code": _own_code()}
    )
    return Subject(_text(device), _text(measuring), fingerprint, _plain(workload.name))


class Knowledge:
    """What is known of a subject; and what one search, in its run directory, adds to it.

    Args:
        subject: None where there is none, or nothing shall be known.
        cap_bytes: what tensors may take.
        exact: their peak alone decides whether a config fits, and is the same on every run.
        notify: is told what the user should know.
    """

    def __init__(
        self, subject: Subject | None, cap_bytes: int, *, exact: bool, run: Path, notify: Callable[[str], None]
    ) -> None:
        self._subject, self._cap_bytes, self._exact = subject, cap_bytes, exact
        self._run, self._session = _plain(str(run)), uuid.uuid4().hex
        self._notify = notify
        self._store = Store()

    def known(self, *, resumed: bool) -> tuple[PriorMeasurement, ...]:
        """What earlier searches say within this budget; what this one has in its journal, when resumed, left out."""
        found = [each for each in self._find() if not (resumed and each.run == self._run)]
        sessions = {session: place for place, session in enumerate(dict.fromkeys(each.session for each in found), 1)}
        known = [
            prior_measurement(
                each.measurement,
                sessions[each.session],
                then=each.cap_bytes,
                now=self._cap_bytes,
                exact=self._exact,
            )
            for each in found
        ]
        told = tuple(each for each in known if each is not None)
        if told:
            count = len({each.config for each in told})
            seen = f"earlier searches measured {counted(count, 'config')}"
            self._notify(f"{seen}: they tell where to start (--no-store leaves them out)")
        return told

    def keep(self, measurement: Measurement, *, plan: str = "explored") -> None:
        """Let later searches know it."""
        if self._subject is None:
            return
        try:
            stored = Stored(measurement, self._cap_bytes, self._run, self._session, plan)
            self._store.add(self._subject, stored)
        except StoreError as error:
            self._give_up(error)

    def _find(self) -> list[Stored]:
        try:
            return [] if self._subject is None else self._store.find(self._subject)
        except StoreError as error:
            self._give_up(error)
            return []

    def _give_up(self, error: StoreError) -> None:
        self._subject = None
        self._notify(f"the search goes on without what is stored: {error}")


@functools.cache
def _own_code() -> str:
    """A checkout changes without its version, and what is installed does not."""
    found = hashlib.sha256()
    for room in _MEASURING:
        for file in sorted((_PACKAGE / room).rglob("*.py")):
            found.update(f"{file.relative_to(_PACKAGE)}".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)


def _plain(text: str) -> str:
    """Names of files may hold bytes that no database takes for text."""
    return text.encode(errors="backslashreplace").decode()
