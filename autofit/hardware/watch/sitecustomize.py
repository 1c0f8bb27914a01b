"""Watches the optimizer steps of a process of another tool, into which autofit is not installed.

Python imports the first `sitecustomize` of its path before anything else, in every process that a
tool starts. This one loads the watch and the tracker by their files, so that nothing of autofit's
package is imported there.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def _loaded(name: str) -> ModuleType:
    """A file beside this folder, as a module that belongs to no package."""
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"watched_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


if "WATCHED_STEPS" in os.environ:
    _tracker = _loaded("tracker")
    _loaded("step_watch").watch(os.environ, _tracker.StorageTracker, _tracker.AllocationRecord)
