"""Run by every Python under the fake CUDA as it starts: turns off attention by cuDNN as soon as torch is imported.

PyTorch prefers it on a card of this kind, and cuDNN asks the real driver for what no stand-in answers.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch where it lies, and has its import end with cuDNN's attention turned off."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch alone, its loader changed."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_turn_off(module: ModuleType) -> None:
            load(module)
            module.backends.cuda.enable_cudnn_sdp(False)

        spec.loader.exec_module = load_and_turn_off  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TorchFinder())
