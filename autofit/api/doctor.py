"""What `autofit doctor` shows: the device, the default budget, what is stored, and which techniques
work or why not."""

import dataclasses
from typing import Any

from autofit import techniques
from autofit.core.environment import version_of, versions
from autofit.core.errors import InputError, StoreError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.estimate.calibration import calibration_for
from autofit.hardware.budgets import budget_for
from autofit.probe import LocalExecutor
from autofit.setup import Technique
from autofit.tuning.measurement_store import Count, Store

# Other knobs that some values need to mean anything: their absence is no reason against a value.
_LORA, _BF16 = {"lora_rank": 8}, {"precision": "bf16"}
_BESIDE: tuple[dict[str, Any], ...] = ({}, _LORA, _BF16, {"compile": "default"}, {**_BF16, **_LORA})


def examine(device: str | None = None) -> dict[str, Any]:
    """Plain data on hardware, budget in GiB, versions, the store, and every technique with its
    values."""
    options = search_options(device=device)
    with LocalExecutor() as executor:
        hardware = executor.detect(device)
    store, trouble = Store(), None
    try:
        count: Count | None = store.count()
    except StoreError as error:
        count, trouble = None, str(error)
    return {
        "schema": 1,
        "hardware": hardware.to_dict(),
        "budget_gib": round(budget_for(options, hardware).device_bytes / GIB, 2),
        "versions": versions(),
        "calibration": dataclasses.asdict(calibration_for(hardware)),
        "store": {**_counted(store, count), "trouble": trouble},
        "techniques": [_availability(technique, hardware) for technique in techniques.all_techniques()],
    }


def clear_store() -> dict[str, Any]:
    """Remove all stored measurements; how many there were, None where they could not be read."""
    store = Store()
    return {"schema": 1, "cleared": _counted(store, store.clear())}


def _counted(store: Store, count: Count | None) -> dict[str, Any]:
    counts = dataclasses.asdict(count) if count else {"measurements": None, "models": None}
    return {"path": str(store.path), **counts}


def _availability(technique: Technique, hardware: Hardware) -> dict[str, Any]:
    """Every value of a knob: its package, whether a search tries it, and whether it works here or
    why not."""
    offered = technique.choices(hardware)
    rows: list[dict[str, Any]] = []
    for value in technique.values or offered:
        package, reason = technique.package(value), _reason(technique.name, value, hardware)
        made_with = {"package": package, "version": version_of(package)}
        usable = {"searched": value in offered, "available": reason is None, "reason": reason}
        rows.append({"value": value, **made_with, **usable})
    return {"name": technique.name, "values": rows}


def _reason(name: str, value: Any, hardware: Hardware) -> str | None:
    """Why a value cannot be used here, whatever the model and the other knobs; preferably the
    knob's own reason."""
    workload = Workload(lambda: None, lambda n: None, effective_batch_size=1024, task="causal-lm", name="any model")
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
