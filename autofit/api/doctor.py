"""What this machine offers: the device, the default budget, and which techniques can be used or why not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from autofit import techniques
from autofit.core.environment import versions
from autofit.core.errors import InputError, StoreError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.estimate import calibration_for
from autofit.hardware.budgets import budget_for
from autofit.probe import LocalExecutor
from autofit.setup import Technique
from autofit.tuning.measurement_store import Count, Store


def examine(device: str | None = None) -> dict[str, Any]:
    """Plain data on hardware, budget in GiB, versions, what is stored, and every technique with its values.

    Raises:
        InputError: there is no such kind of device; ProbeError: the device asked for is not there.
    """
    options = search_options(device=device)
    with LocalExecutor() as executor:
        hardware = executor.detect(device)
    budget = budget_for(options, hardware)
    return {
        "schema": 1,
        "hardware": hardware.to_dict(),
        "budget_gib": round(budget.device_bytes / GIB, 2),
        "versions": versions(),
        "calibration": dataclasses.asdict(calibration_for(hardware)),
        "store": _stored(),
        "techniques": [_availability(technique.name, hardware) for technique in techniques.all_techniques()],
    }


def clear_store() -> dict[str, Any]:
    """Forget what searches have measured; how much that was, None where it could not be read.

    Raises:
        StoreError: it cannot be removed.
    """
    store = Store()
    return {"schema": 1, "cleared": {"path": str(store.path), **_counted(store.clear())}}


def _stored() -> dict[str, Any]:
    """What searches can start from, or why they cannot."""
    store = Store()
    try:
        return {"path": str(store.path), **_counted(store.count()), "trouble": None}
    except StoreError as error:
        return {"path": str(store.path), **_counted(None), "trouble": str(error)}


def _counted(count: Count | None) -> dict[str, int | None]:
    return dataclasses.asdict(count) if count else {"measurements": None, "models": None}


def _availability(name: str, hardware: Hardware) -> dict[str, Any]:
    """Every value of a knob: what it is made with, whether it works here, whether a search tries it, or why not."""
    technique = techniques.technique_named(name)
    offered = technique.choices(hardware)
    return {
        "name": name,
        "values": [
            _value(technique, value, searched=value in offered)
            | {"available": (reason := _reason(name, value, hardware)) is None, "reason": reason}
            for value in technique.values or offered
        ],
    }


def _value(technique: Technique, value: Any, *, searched: bool) -> dict[str, Any]:
    package = technique.package(value)
    return {"value": value, "package": package, "version": _version(package), "searched": searched}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# What some values need beside them to mean anything: none of it is a reason against them.
_BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"lora_rank": 8},
    {"precision": "bf16"},
    {"compile": "default"},
    {"precision": "bf16", "lora_rank": 8},
)


def _reason(name: str, value: Any, hardware: Hardware) -> str | None:
    """Why a value cannot be used here, whatever the model and the other knobs; of several reasons its own."""
    workload = Workload(
        model=lambda: None, batch=lambda n: None, effective_batch_size=1024, task="causal-lm", name="any model"
    )
    reasons = []
    for beside in _BESIDE:
        try:
            config = techniques.canonicalize({**beside, name: value}, workload, hardware)
            reason = techniques.refuse(config, workload, hardware)
        except InputError as error:
            reason = str(error)
        if reason is None:
            return None
        reasons.append(reason)
    return min(reasons, key=lambda reason: not reason.startswith(f"{name}:")).removeprefix(f"{name}: ")
