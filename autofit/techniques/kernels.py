"""kernels: Triton kernels for a transformers model's norms, rotary embeddings and gated
activations.

A norm, a rotation or SwiGLU moves more memory than it computes; one kernel for all its operations
reads and writes once, and saves less for the backward. Liger has such kernels for some fifty model
types, and which of them it enables by default for each type is known to work; its own losses stay
off, because `loss` decides that.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from autofit.core.knobs.kernels import KNOB
from autofit.core.knobs.precision import COMPUTES_IN_FP32
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.setup import Config, Hardware, RefusedError, Setup, Stage, Technique, Value, Workload
from autofit.setup.deferred_logits import loss_of_few_tokens
from autofit.setup.liger import no_kernels_for, stand_in_for_liger, why_not_liger

# Relative, of the loss and of each module's output: the kernels round differently.
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 2e-2
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_MISSING = object()


class Kernels(Technique):
    """`liger`: liger-kernel's kernels for this type of model, on CUDA."""

    record = KNOB
    stage = Stage.BLOCKS
    cuda_values = ("liger",)
    library = "liger-kernel"
    all_exact = True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if workload.task == DIFFUSION.name:
            return "liger has no kernels for models of diffusers; use none."
        return why_not_liger("liger", hardware, "none")

    def apply(self, setup: Setup, value: Value) -> None:
        patch = _patch_for(setup.model)
        batch = setup.workload.batch(1)
        before = loss_of_few_tokens(setup, batch)
        snapshot = _Snapshot(setup.model)
        setup.on_close(snapshot.restore)

        options = inspect.signature(patch).parameters  # a vision encoder has no loss to turn off
        patch(model=setup.model, **{name: False for name in _LOSSES if name in options})
        forwards = {id(owner) for owner, name, _ in snapshot.changes() if name == "forward"}
        changed = [module for module in setup.model.modules() if id(vars(module)) in forwards]
        if not changed:
            raise RefusedError("liger changed nothing about this model; use none.")

        is_low = setup.config.precision not in COMPUTES_IN_FP32
        tolerance = _LOW_PRECISION_TOLERANCE if is_low else _TOLERANCE
        with _compared(changed, tolerance):
            after = loss_of_few_tokens(setup, batch)
        if math.isfinite(before) and not abs(after - before) <= tolerance * abs(before):
            raise RefusedError(
                f"with liger's kernels the loss is {after:.6g} instead of {before:.6g}; use none."
            )

    def trace(self, setup: Setup, value: Value) -> None:
        """Without the comparison, which needs numbers."""
        stand_in_for_liger(setup)


def _patch_for(model: nn.Module) -> Any:
    """Liger's function that patches this type of model.

    Raises:
        RefusedError: where there is none, or this version of Liger does not work with this version
            of transformers.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise RefusedError(
            f"liger-kernel cannot be imported with this version of transformers: {error}.",
            "Install another version of it, or use none.",
        ) from error

    functions: dict[str, Any] = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in functions:
        raise no_kernels_for(kind)
    return functions[kind]


@contextmanager
def _compared(modules: list[nn.Module], tolerance: float) -> Iterator[None]:
    """Compare each module's output with that of its class.

    Liger binds SwiGLU to an MLP whatever activation the config names, and with random weights the
    loss hardly shows it.
    """

    def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        expected = type(module).forward(module, *args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return

        difference = float((result - expected).float().norm() / expected.float().norm())
        if difference > tolerance:
            raise RefusedError(
                f"liger's {type(module).__name__} differs from the model's own by "
                f"{difference:.2g} of its output; use none."
            )

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
        yield


class _Snapshot:
    """All that Liger may change: attributes and children of the model's modules, the names in their
    source files, and the attributes of the classes there."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(owner, dict(_names(owner))) for owner in _owners(model)]

    def changes(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, value before) of every change since."""
        for owner, before in self._before:
            now = _names(owner)
            for name in {*before, *now}:
                value = before.get(name, _MISSING)
                if value is not now.get(name, _MISSING):
                    yield owner, name, value

    def restore(self) -> None:
        """Undo every change."""
        for owner, name, value in list(self.changes()):
            if isinstance(owner, type) and value is _MISSING:
                delattr(owner, name)
            elif isinstance(owner, type):
                setattr(owner, name, value)
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
        if not file.startswith("transformers."):
            continue
        names = vars(sys.modules[file])
        yield names
        classes = [value for value in names.values() if isinstance(value, type)]
        yield from [kind for kind in classes if kind.__module__ == file]


def _names(owner: Any) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, type) else owner
