"""What `autofit doctor` shows: the device, the default budget, what is stored, and which techniques
work or why not."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from autofit import techniques
from autofit.core.environment import version_of, versions
from autofit.core.errors import InputError, ProbeError, StoreError, describe_error
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.workload import Workload
from autofit.estimate.calibration import calibration_for
from autofit.hardware.budgets import budget_for
from autofit.probe import LocalExecutor
from autofit.setup import Technique
from autofit.tuning.measurement_store import Count, Store

# Other knobs that some values need to mean anything: their absence is no reason against a value.
_LORA = {"lora_rank": 8}
_BF16 = {"precision": "bf16"}
_COMPANIONS: tuple[dict[str, Any], ...] = (
    {},
    _LORA,
    _BF16,
    {"compile": "default"},
    {**_BF16, **_LORA},
)

# The module of each package that breaks where it does not suit the others.
_MODULES = {
    "transformers": "transformers.modeling_utils",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "triton": "triton",
    "liger-kernel": "liger_kernel",
    "flash-attn": "flash_attn",
}
_IMPORT_SECONDS = 120.0


def examine(device: str | None = None) -> dict[str, Any]:
    """Plain data: hardware, budget in GiB, versions, the store, every technique with its values."""
    options = search_options(device=device)
    with LocalExecutor() as executor:
        hardware = executor.detect(device)
        broken = _broken_packages(executor)

    store = Store()
    count: Count | None = None
    trouble = None
    try:
        count = store.count()
    except StoreError as error:
        trouble = str(error)

    registered = techniques.all_techniques()
    budget = budget_for(options, hardware)
    return {
        "schema": 1,
        "hardware": hardware.to_dict(),
        "budget_gib": round(budget.device_bytes / GIB, 2),
        "versions": versions(),
        "broken": broken,
        "calibration": dataclasses.asdict(calibration_for(hardware)),
        "store": {**_contents(store, count), "trouble": trouble},
        "techniques": [_availability(technique, hardware, broken) for technique in registered],
    }


def clear_store() -> dict[str, Any]:
    """Remove all stored measurements; how many there were, None where they could not be read."""
    store = Store()
    return {"schema": 1, "cleared": _contents(store, store.clear())}


def _contents(store: Store, count: Count | None) -> dict[str, Any]:
    contents = {"path": str(store.path), "measurements": None, "models": None}
    if count:
        contents |= dataclasses.asdict(count)
    return contents


def _broken_packages(executor: LocalExecutor) -> dict[str, str]:
    """What is installed and cannot be imported, each with the error; such as a torchvision that was
    built for another torch, which takes much of transformers along."""
    broken = {}
    for package, module in _MODULES.items():
        if version_of(package) is None:
            continue
        try:
            error = executor.run(
                _import_error,
                None,
                module,
                log="doctor.log",
                timeout=_IMPORT_SECONDS,
                task=f"importing {package}",
            )
        except ProbeError as ended:  # a library that takes its process along
            error = ended.message
        if error:
            broken[package] = error
    return broken


def _import_error(_: None, module: str) -> str | None:
    """Why a module cannot be imported; None where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return describe_error(error)
    return None


def _availability(
    technique: Technique,
    hardware: Hardware,
    broken: Mapping[str, str],
) -> dict[str, Any]:
    """Every value of a knob: its package, whether a search tries it, why it cannot be used here."""
    offered = technique.choices(hardware)
    rows: list[dict[str, Any]] = []
    for value in technique.values or offered:
        package = technique.package(value)
        reason = _reason(technique.name, value, hardware)
        if reason is None and package in broken:
            reason = f"{package} cannot be imported: {broken[package]}."
        row = {
            "value": value,
            "package": package,
            "version": version_of(package),
            "searched": value in offered,
            "available": reason is None,
            "reason": reason,
        }
        rows.append(row)
    return {"name": technique.name, "values": rows}


def _reason(name: str, value: Any, hardware: Hardware) -> str | None:
    """Why a value cannot be used here, whatever the model and the other knobs.

    Preferably it is the knob's own reason; None: it can be used.
    """
    workload = Workload(
        lambda: None,
        lambda n: None,
        effective_batch_size=1024,
        task=CAUSAL_LM.name,
        name="any model",
    )
    reasons = []
    for companions in _COMPANIONS:
        try:
            config = techniques.canonicalize({**companions, name: value}, workload, hardware)
            reason = techniques.refuse(config, workload, hardware)
        except InputError as error:
            reason = str(error)
        if reason is None:
            return None
        reasons.append(reason)

    own = [reason for reason in reasons if reason.startswith(f"{name}:")]
    return (own or reasons)[0].removeprefix(f"{name}: ")
