"""The knobs that ship with autofit: every file here but `knob` is the record of one."""

import importlib
import pkgutil
from collections.abc import Mapping

from autofit.core.errors import unknown
from autofit.core.knobs.knob import Knob, Trace, Value, is_off, yaml_word

__all__ = [
    "DERIVED",
    "FIDELITY_ORDER",
    "KNOBS",
    "OF_ADAPTERS",
    "SETTABLE",
    "Knob",
    "Trace",
    "Value",
]
__all__ += ["check_knobs", "is_off", "knob_named", "yaml_word"]

KNOBS: dict[str, Knob] = {}
for _info in pkgutil.iter_modules(__path__):
    if _info.name != "knob":
        KNOBS[_info.name] = importlib.import_module(f"{__name__}.{_info.name}").KNOB

# The knobs that break a tie between equally fast configs, the most telling first.
_RANKED = sorted(KNOBS.values(), key=lambda knob: knob.fidelity_order)
FIDELITY_ORDER = tuple(knob.name for knob in _RANKED if knob.fidelity_order)

DERIVED = frozenset(name for name, knob in KNOBS.items() if knob.derived)
SETTABLE = {name: knob for name, knob in KNOBS.items() if not knob.derived}
OF_ADAPTERS = frozenset(name for name, knob in KNOBS.items() if "lora_rank" in (name, knob.beside))


def knob_named(name: str) -> Knob:
    """The record of a knob; of one that somebody added, and that has none here, only its name."""
    return KNOBS.get(name) or Knob(name)


def check_knobs(config: Mapping[str, Value]) -> None:
    """Raise an InputError for a knob of a config that does not exist, or a value it never takes."""
    for name, value in config.items():
        if name not in KNOBS:
            raise unknown("knob", name, KNOBS)
        KNOBS[name].check(value)
