"""Where the training of a saved result runs, and the memory that it may use."""

from typing import Any

from autofit.core.result import SavedResult
from autofit.hardware.device import usual_kind


def place_of(saved: SavedResult) -> dict[str, Any]:
    """The arguments of `fit` for the device that a result was for, or the one here where it does not
    say, and for its budget."""
    device = saved.hardware.get("device") or usual_kind()
    budget = "mem" if device == "cpu" else "gpu_mem"
    return {"device": device, budget: saved.hardware.get("budget_gib") or None}
