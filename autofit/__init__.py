"""autofit: the fastest training configuration that fits your memory, measured, and the loop for it.

Names are resolved when first used, so that `import autofit` loads neither torch nor anything else
that is heavy.
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
    from autofit.api.plan_grpo import plan_grpo
    from autofit.api.prepare import TrainingStep, prepare
    from autofit.api.search import search
    from autofit.api.training_arguments import TrainerSetup, training_arguments
    from autofit.api.tune import tune
    from autofit.core.config import Config
    from autofit.core.errors import (
        AutofitError,
        InputError,
        NothingFitsError,
        ProbeError,
        RefusedError,
    )
    from autofit.core.estimate import Estimate
    from autofit.core.result import Result
    from autofit.core.workload import Workload
    from autofit.export.from_result import export
    from autofit.models import losses
    from autofit.report.explain import explain
    from autofit.setup import Setup, Stage, Technique
    from autofit.techniques import register
    from autofit.training.loop import STOP

__version__ = "0.1.0"

__all__ = [
    "fit",
    "prepare",
    "search",
    "estimate",
    "plan_grpo",
    "tune",
    "explain",
    "training_arguments",
    "export",
    "register",
    "losses",
    "Workload",
    "Config",
    "Result",
    "Estimate",
    "Trained",
    "TrainingStep",
    "TrainerSetup",
    "Technique",
    "Stage",
    "Setup",
    "STOP",
    "Judge",
    "AutofitError",
    "InputError",
    "RefusedError",
    "NothingFitsError",
    "ProbeError",
]

# The module of each name.
_HOMES = {
    "fit": "api.fit",
    "prepare": "api.prepare",
    "search": "api.search",
    "estimate": "api.estimate",
    "plan_grpo": "api.plan_grpo",
    "tune": "api.tune",
    "explain": "report.explain",
    "training_arguments": "api.training_arguments",
    "export": "export.from_result",
    "register": "techniques",
    "losses": "models",
    "Workload": "core.workload",
    "Config": "core.config",
    "Result": "core.result",
    "Estimate": "core.estimate",
    "Trained": "api.fit",
    "TrainingStep": "api.prepare",
    "TrainerSetup": "api.training_arguments",
    "Technique": "setup",
    "Stage": "setup",
    "Setup": "setup",
    "STOP": "training.loop",
    "Judge": "api.judge",
    "AutofitError": "core.errors",
    "InputError": "core.errors",
    "RefusedError": "core.errors",
    "NothingFitsError": "core.errors",
    "ProbeError": "core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")

    module = importlib.import_module(f"autofit.{_HOMES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, in which `search`, `estimate` and `export` stay functions.

    Rooms have these names too. Python writes each imported room into the package, under its name,
    and only the package's class can refuse that.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as plain modules are: users' functions that name `autofit` go to probes."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
