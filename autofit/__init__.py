"""autofit: the fastest training configuration that fits your memory, measured, and the loop that runs it.

Names are resolved when first used, so that `import autofit` loads neither torch nor anything else that is heavy.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.api.estimate import estimate
    from autofit.api.fit import Trained, fit
    from autofit.api.judge import Judge
    from autofit.api.search import search
    from autofit.api.training_arguments import TrainerSetup, training_arguments
    from autofit.core.config import Config
    from autofit.core.errors import AutofitError, InputError, NothingFitsError, ProbeError, RefusedError
    from autofit.core.estimate import Estimate
    from autofit.core.result import Result
    from autofit.core.workload import Workload
    from autofit.export.from_result import export
    from autofit.report.explain import explain
    from autofit.setup import Setup, Stage, Technique
    from autofit.techniques import register
    from autofit.training.loop import STOP

__version__ = "0.1.0"

__all__ = ["fit", "search", "estimate", "explain", "training_arguments", "export", "register"]
__all__ += ["Workload", "Config", "Result", "Estimate", "Trained", "TrainerSetup", "Technique", "Stage", "Setup"]
__all__ += ["STOP", "Judge", "AutofitError", "InputError", "RefusedError", "NothingFitsError", "ProbeError"]

_HOMES = {"search": "api.search", "estimate": "api.estimate", "explain": "report.explain", "register": "techniques"}
_HOMES |= {"Judge": "api.judge", "export": "export.from_result", "Config": "core.config", "Workload": "core.workload"}
_HOMES |= {"Result": "core.result", "Estimate": "core.estimate"} | dict.fromkeys(("fit", "Trained"), "api.fit")
_HOMES |= dict.fromkeys(("training_arguments", "TrainerSetup"), "api.training_arguments")
_HOMES |= {"STOP": "training.loop"}
_HOMES |= dict.fromkeys(("Technique", "Stage", "Setup"), "setup")
_HOMES |= dict.fromkeys((name for name in __all__ if name.endswith("Error")), "core.errors")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"autofit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `autofit.search`, `.estimate` and `.export` functions when the rooms of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by name, as plain modules are: a user's function that names `autofit` goes to probes."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
