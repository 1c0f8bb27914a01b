"""The registry of techniques: every module of this package that defines one is a knob, nothing else
to edit. Also what takes all techniques together: the canonical form of a Config, and whether it is
refused."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from autofit.core.constraints import Constraints
from autofit.core.environment import quiet_imports
from autofit.core.errors import require, unknown
from autofit.core.faithfulness import losses, tier_steps
from autofit.core.knobs import FIDELITY_ORDER
from autofit.setup import Config, Hardware, InputError, Technique, Workload

_registry: dict[str, Technique] = {}
_built_in: set[str] = set()


def register(technique: Technique) -> None:
    """Add a technique; it replaces one of the same name.

    Raises:
        InputError: where it lacks a name or a stage.
    """
    require(
        isinstance(technique, Technique),
        "register takes an object of a subclass of autofit.Technique",
        technique,
    )

    for part in ("name", "stage"):
        if not hasattr(technique, part):
            raise InputError(
                f"the technique {type(technique).__name__} has no {part}.",
                f"Set {part} = ... in its class.",
            )

    _registry[technique.name] = technique
    _built_in.discard(technique.name)  # a replaced built-in must be sent to the probes


def all_techniques() -> list[Technique]:
    """Every technique, in the order in which they touch a run."""
    return sorted(_registry.values(), key=lambda technique: (technique.stage, technique.name))


def added_techniques() -> list[Technique]:
    """The techniques that `register` added, which probe processes must register too."""
    return [technique for technique in all_techniques() if technique.name not in _built_in]


def technique_named(name: str) -> Technique:
    """The technique of a knob; where there is none, an InputError names the nearest."""
    if name not in _registry:
        raise unknown("knob", name, _registry)
    return _registry[name]


def check(knobs: Mapping[str, Any], hardware: Hardware) -> None:
    """Raise an InputError for a knob that does not exist or a value it can never take."""
    for name, value in knobs.items():
        technique = technique_named(name)
        if not technique.accepts(value, hardware):
            raise technique.knob(hardware).refusal(value)


def canonicalize(knobs: Mapping[str, Any], workload: Workload, hardware: Hardware) -> Config:
    """The canonical Config: every knob present, absent ones off, meaningless ones null.

    Raises:
        InputError: for an unknown knob, an impossible value, or knobs that contradict each other.
    """
    check(knobs, hardware)
    return constraints(workload, hardware).canonical(knobs)


def constraints(workload: Workload, hardware: Hardware) -> Constraints:
    """The rules of all techniques for configs of this workload on this hardware, one function per
    knob."""
    off = {}
    canonical = {}
    refusals: dict[str, Callable[[Config], str | None]] = {}

    for technique in all_techniques():
        name = technique.name
        off[name] = technique.off
        refusals[name] = functools.partial(_with, technique.refuse, workload, hardware)
        if type(technique).canonicalize is not Technique.canonicalize:
            canonical[name] = functools.partial(_with, technique.canonicalize, workload, hardware)

    refusals.update(workload.rules)
    return Constraints(off=off, canonicalize=canonical, refuse=refusals)


def _with(rule: Callable[..., Any], workload: Workload, hardware: Hardware, config: Config) -> Any:
    return rule(config, workload, hardware)


def refuse(config: Config, workload: Workload, hardware: Hardware) -> str | None:
    """The first technique's reason why a canonical config cannot be, or None."""
    for technique in all_techniques():
        if reason := technique.refuse(config, workload, hardware):
            return f"{technique.name}: {reason}"
    for name, rule in workload.rules.items():
        if reason := rule(config):
            return f"{name}: {reason}"
    return None


def fidelity(config: Config) -> tuple[int, ...]:
    """How faithfully a config learns, as a sort key that breaks ties."""
    named = [name for name in FIDELITY_ORDER if name in _registry]
    ranks = [_registry[name].fidelity(config.get(name)) for name in named]
    return (-tier_steps(config), -losses(config), *ranks)


def optional_packages(config: Config) -> int:
    """How many distributions beside torch a config needs."""
    packages = set()
    for known in all_techniques():
        value = config.get(known.name)
        if value not in (None, known.off):
            packages.add(known.package(value))

    return len(packages - {"torch"})


def keeps_on_host(config: Config) -> bool:
    """Whether any value of a config stores in host memory part of what a GPU trains."""
    techniques = all_techniques()
    return any(known.keeps_on_host(config.get(known.name, known.off)) for known in techniques)


quiet_imports()  # techniques import others' packages where they are applied
for _info in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_info.name}")
    for _, _kind in inspect.getmembers(_module, inspect.isclass):
        if issubclass(_kind, Technique) and _kind.__module__ == _module.__name__:
            register(_kind())
            _built_in.add(_kind.name)
