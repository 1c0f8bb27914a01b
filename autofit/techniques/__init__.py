"""The registry of techniques: every module of this package that defines one is a knob, nothing else to edit.

Also what only all techniques together can say: the canonical form of a Config, and whether it is refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.environment import quiet_imports
from autofit.core.errors import InputError, unknown
from autofit.core.hardware import Hardware
from autofit.core.knobs import FIDELITY_ORDER
from autofit.core.workload import Workload
from autofit.setup import Technique

_registry: dict[str, Technique] = {}
_built_in: set[str] = set()


def _discover() -> None:
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Technique) and kind.__module__ == module.__name__:
                register(kind())
                _built_in.add(kind.name)


def register(technique: Technique) -> None:
    """Add a technique of one's own; one of the same name takes the place of the former.

    Raises:
        InputError: it lacks a name or a stage.
    """
    for part in ("name", "stage"):
        if not hasattr(technique, part):
            raise InputError(
                f"the technique {type(technique).__name__} has no {part}.", f"Set {part} = ... in its class."
            )
    _registry[technique.name] = technique
    _built_in.discard(technique.name)  # one that takes the place of a built-in has to be sent to the probes


def all_techniques() -> list[Technique]:
    """Every technique, in the order in which they touch a run."""
    return sorted(_registry.values(), key=lambda technique: (technique.stage, technique.name))


def added_techniques() -> list[Technique]:
    """The techniques that `register` added, which a probe process has to be told of."""
    return [technique for technique in all_techniques() if technique.name not in _built_in]


def technique_named(name: str) -> Technique:
    """The technique of a knob.

    Raises:
        InputError: no such knob; names the nearest one.
    """
    if name not in _registry:
        raise unknown("knob", name, _registry)
    return _registry[name]


def check(knobs: Mapping[str, Any], hardware: Hardware) -> None:
    """Raise an InputError for a knob that does not exist or a value it can never take."""
    for name, value in knobs.items():
        technique = technique_named(name)
        if not technique.accepts(value, hardware):
            raise _unacceptable(technique, value, technique.values or technique.choices(hardware))


def _unacceptable(technique: Technique, value: Value, known: tuple[Value, ...]) -> InputError:
    if isinstance(value, str) and not technique.takes:
        return unknown(f"value for {technique.name}", value, known)
    given = "null" if value is None else repr(value)
    choices = ", ".join("null" if each is None else str(each) for each in known)
    remedy = f"It takes {technique.takes}." if technique.takes else f"Choose from: {choices}." if choices else ""
    return InputError(f"{technique.name} cannot be {given}.", remedy)


def canonicalize(knobs: Mapping[str, Any], workload: Workload, hardware: Hardware) -> Config:
    """The canonical Config: every knob present, absent ones off, meaningless ones null.

    Raises:
        InputError: an unknown knob, an impossible value, or knobs that contradict each other.
    """
    check(knobs, hardware)
    return constraints(workload, hardware).canonical(knobs)


def constraints(workload: Workload, hardware: Hardware) -> Constraints:
    """What all techniques say of configs of this workload on this hardware, each for itself."""
    order = all_techniques()
    settling = [
        each for each in order if type(each).canonicalize is not Technique.canonicalize
    ]  # the others keep what is given
    return Constraints(
        off={each.name: each.off for each in order},
        canonicalize={each.name: functools.partial(_settled, each, workload, hardware) for each in settling},
        refuse={each.name: functools.partial(_refused, each, workload, hardware) for each in order},
    )


def _settled(technique: Technique, workload: Workload, hardware: Hardware, config: Config) -> Value:
    return technique.canonicalize(config, workload, hardware)


def _refused(technique: Technique, workload: Workload, hardware: Hardware, config: Config) -> str | None:
    return technique.refuse(config, workload, hardware)


def refuse(config: Config, workload: Workload, hardware: Hardware) -> str | None:
    """The first technique's reason why a canonical config cannot be, or None."""
    for technique in all_techniques():
        reason = technique.refuse(config, workload, hardware)
        if reason:
            return f"{technique.name}: {reason}"
    return None


def fidelity(config: Config) -> tuple[int, ...]:
    """How faithfully a config learns, comparable: DESIGN section 5 names the order of knobs that breaks ties."""
    full = 0 if config.get("lora_rank") else 1
    return (full, *(_registry[name].fidelity(config.get(name)) for name in FIDELITY_ORDER if name in _registry))


def keeps_on_host(config: Config) -> bool:
    """Whether any of a config's values keeps part of what a GPU trains in the host's memory."""
    return any(each.keeps_on_host(config.get(each.name, each.off)) for each in all_techniques())


quiet_imports()  # techniques import others' packages where they are applied
_discover()
