"""What there is: `autofit doctor`, `autofit models` and `autofit spaces`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from autofit.cli.options import ClearStore, Device, Json
from autofit.cli.output import heavy, print_json, print_list
from autofit.models import describe_presets
from autofit.report import cleared_text, doctor_table, models_table, spaces_table


def doctor(device: Device = None, clear_store: ClearStore = False, as_json: Json = False) -> int:
    """What this machine offers: device, budget, and which techniques are available.

    Examples:
      autofit doctor
      autofit doctor --device cpu --json
    """
    shown: Callable[[Any], Any] = cleared_text if clear_store else doctor_table
    data = (
        heavy("autofit.api.doctor", "clear_store")() if clear_store else heavy("autofit.api.doctor", "examine")(device)
    )
    print_json(data) if as_json else Console().print(shown(data), soft_wrap=clear_store, markup=False)
    return 0


def models(as_json: Json = False) -> int:
    """The models known by name, for --model.

    Example:
      autofit models
    """
    return print_list("models", describe_presets(), models_table, as_json)


def spaces(as_json: Json = False) -> int:
    """The search spaces that ship with autofit, for --space, and how many configs each holds.

    Example:
      autofit spaces
    """
    data = heavy("autofit.api.spaces", "describe_spaces")()
    print_json(data) if as_json else Console().print(spaces_table(data["spaces"], data["counted_for"]))
    return 0
