"""kernels: Triton kernels in the place of a transformers model's norms, rotary embeddings and gated activations.

A norm, a rotation or SwiGLU reads and writes memory more than it computes; one kernel for all its operations reads and
writes once, and keeps less for the backward. Liger carries such kernels for some fifty kinds of models, and which of
them it switches on by default for each kind is known to work; its own losses stay off, for `loss` decides that.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.deferred_logits import loss_of_few_tokens
from autofit.setup.liger import no_kernels_for, stand_in_for_liger

_TOLERANCE = 1e-3  # relative, of the loss and of what each module computes: the kernels round otherwise
_LOW_PRECISION_TOLERANCE = 2e-2
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_MISSING = object()


class Kernels(Technique):
    """`liger`: the kernels of liger-kernel for this kind of model, on CUDA."""

    name = "kernels"
    stage = Stage.BLOCKS
    off = "none"
    values = ("none", "liger")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return self.values if hardware.device == "cuda" else ("none",)

    def package(self, value: Value) -> str:
        return "liger-kernel" if value == "liger" else "torch"

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if hardware.device != "cuda":
            return "liger is made of Triton kernels, which run on CUDA only; use none."
        if hardware.here and not requirements.installed("liger_kernel"):
            return "liger needs liger-kernel, which is not installed; pip install liger-kernel, or use none."
        if hardware.here and (lacking := requirements.no_compiler(hardware.device)):
            return f"liger compiles its kernels: {lacking}, or use none."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        patch = _patch_for(setup.model)
        before = loss_of_few_tokens(setup)
        state = _State(setup.model)
        setup.on_close(state.restore)
        taken = inspect.signature(patch).parameters  # a vision encoder has no loss to leave alone
        patch(model=setup.model, **{name: False for name in _LOSSES if name in taken})
        changed = state.changed_modules(setup.model)
        if not changed:
            raise RefusedError("liger changed nothing about this model; use none.")
        low = setup.frozen_dtype not in (None, torch.float32)
        tolerance = _LOW_PRECISION_TOLERANCE if low else _TOLERANCE
        with _compared(changed, tolerance):
            after = loss_of_few_tokens(setup)
        if math.isfinite(before) and not abs(after - before) <= tolerance * abs(before):
            raise RefusedError(f"with liger's kernels the loss is {after:.6g} in the place of {before:.6g}; use none.")

    def trace(self, setup: Setup, value: Value) -> None:
        """Without the comparison, which needs numbers."""
        stand_in_for_liger(setup)


def _patch_for(model: nn.Module) -> Any:
    """Liger's function that patches this kind of model.

    Raises:
        RefusedError: there is none, or this version of Liger does not go with this version of transformers.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        message = f"liger-kernel cannot be imported beside this version of transformers: {error}."
        raise RefusedError(message, "Install another version of it, or use none.") from error
    functions: dict[str, Any] = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in functions:
        raise no_kernels_for(kind)
    return functions[kind]


@contextmanager
def _compared(modules: list[nn.Module], tolerance: float) -> Iterator[None]:
    """Inside, hold what each module computes against what its class does.

    Liger binds SwiGLU to an MLP whatever activation the config names, and with random weights the loss hardly tells.
    """

    def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        expected = type(module).forward(module, *args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return
        difference = float((result - expected).float().norm() / expected.float().norm())
        if difference > tolerance:
            name = type(module).__name__
            message = f"liger's {name} differs from the model's own by {difference:.2g} of its output; use none."
            raise RefusedError(message)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
        yield


class _State:
    """What Liger may change: attributes and children of the model's modules, the names in their source files, and the
    attributes of the classes there."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(owner, dict(_names(owner))) for owner in _owners(model)]

    def changes(self) -> Iterator[tuple[Any, str, Any]]:
        """(whose, which name, what it was) of all that is other than it was."""
        for owner, before in self._before:
            now = _names(owner)
            for name in {*before, *now}:
                if before.get(name, _MISSING) is not now.get(name, _MISSING):
                    yield owner, name, before.get(name, _MISSING)

    def changed_modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose instances were given another forward."""
        other = {id(owner) for owner, name, _ in self.changes() if name == "forward"}
        return [module for module in model.modules() if id(vars(module)) in other]

    def restore(self) -> None:
        """Make everything what it was."""
        for owner, name, value in list(self.changes()):
            if isinstance(owner, type):
                delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
            elif value is _MISSING:
                del owner[name]
            else:
                owner[name] = value


def _owners(model: nn.Module) -> Iterator[Any]:
    """Dictionaries of names, and classes, whose names can only be set one by one."""
    for module in model.modules():
        yield vars(module)
        yield module._modules
    for file in {type(module).__module__ for module in model.modules()}:
        if file.startswith("transformers."):
            names = vars(sys.modules[file])
            yield names
            yield from [each for each in names.values() if isinstance(each, type) and each.__module__ == file]


def _names(owner: Any) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, type) else owner
