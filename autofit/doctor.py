"""What this machine offers: the device, the default budget, and which techniques can be used or why not."""

from __future__ import annotations

from typing import Any

from autofit import techniques
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.probe import Prober
from autofit.tune import budget_for, versions


def examine(device: str | None = None) -> dict[str, Any]:
    """Plain data on hardware, budget in GiB, versions, and every technique with its values.

    Raises:
        InputError: there is no such kind of device; ProbeError: the device asked for is not there.
    """
    options = search_options(device=device)
    with Prober() as prober:
        hardware = prober.detect(device)
    budget = budget_for(options, hardware)
    return {
        "schema": 1,
        "hardware": hardware.to_dict(),
        "budget_gib": round(budget.device_bytes / GIB, 2),
        "versions": versions(),
        "techniques": [_availability(technique.name, hardware) for technique in techniques.all_techniques()],
    }


def _availability(name: str, hardware: Hardware) -> dict[str, Any]:
    """The values a search would try here, and the reason against each of the others."""
    technique = techniques.technique_named(name)
    offered = technique.choices(hardware)
    every = technique.values or offered
    reasons = {}
    for value in every:
        reason = _reason(name, value, hardware)
        if reason:
            reasons[str(value)] = reason
        elif value not in offered:
            reasons[str(value)] = "not worth searching on this device; can be set by hand."
    available = [value for value in every if str(value) not in reasons]
    return {"name": name, "choices": available, "unavailable": reasons}


def _reason(name: str, value: Any, hardware: Hardware) -> str | None:
    """Why a value cannot be used here, whatever the model."""
    workload = Workload(model=lambda: None, batch=lambda n: None, effective_batch_size=1024)
    knobs = {name: value, **({"lora_rank": 8} if name == "lora_targets" else {})}
    try:
        return techniques.refuse(techniques.settle(knobs, workload, hardware), workload, hardware)
    except InputError as error:
        return str(error)
