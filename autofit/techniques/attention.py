"""attention: how softmax(QK)V is computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.flash_attn import IMPLEMENTATION, stand_in_for_flash_attn

_AMPERE = (8, 0)  # first compute capability that FlashAttention-2 has kernels for


class Attention(Technique):
    """`sdpa`: the framework's choice, but for cuDNN's where shapes vary. `eager`: plain matrix products, which hold the
    whole score matrix. `flash`: FlashAttention-2 (Dao 2023, arXiv 2307.08691) or nothing, by flash-attn where it is
    installed and the model knows it, by PyTorch's own copy else. null where the model has no attention to choose."""

    name = "attention"
    stage = Stage.BLOCKS
    off = "sdpa"
    values = ("sdpa", "eager", "flash")
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return self.values if hardware.device == "cuda" else ("sdpa", "eager")

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        uses_it = workload.traits is None or workload.traits.sdpa
        return config[self.name] or self.off if uses_it else None

    def accepts(self, value: Value, hardware: Hardware) -> bool:
        return value is None or super().accepts(value, hardware)

    def package(self, value: Value) -> str:
        return "flash-attn" if value == "flash" and _has_flash_attn() else "torch"

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != "flash":
            return None
        if hardware.device == "cpu":
            return "flash needs CUDA; use sdpa, which on a CPU takes PyTorch's flash kernel already."
        if hardware.capability and hardware.capability < _AMPERE:
            capability = ".".join(str(part) for part in hardware.capability)
            return f"flash needs compute capability 8.0, {hardware.name} has {capability}; use sdpa."
        if config["precision"] in ("fp32", "tf32"):
            return f"flash computes in 16 bits only, not in {config['precision']}; set precision bf16 or bf16-mixed."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value is None:
            return
        if value == self.off:
            _leave_out_plans(setup)
            return
        model: Any = setup.model
        named = hasattr(model, "set_attn_implementation")
        if value == "flash" and not (named and _has_flash_attn()):
            if named:  # a model that was given with another implementation would not come to PyTorch's
                _set_implementation(setup, "sdpa")
            setup.step_contexts.append(_flash_or_nothing)
        elif named:
            _set_implementation(setup, IMPLEMENTATION if value == "flash" else str(value))
        else:
            # Around forward and backward: a checkpointed block must take the same path when it is computed again.
            setup.step_contexts.append(lambda: sdpa_kernel(SDPBackend.MATH))

    def trace(self, setup: Setup, value: Value) -> None:
        """flash-attn has a stand-in. It need not be installed to plan: for a card elsewhere it is taken to be there."""
        planned = not setup.hardware.here
        if (
            value != "flash"
            or not hasattr(setup.model, "set_attn_implementation")
            or not (planned or _has_flash_attn())
        ):
            self.apply(setup, value)
            return
        if planned:
            setup.assumptions.append("attention flash is that of flash-attn, which is to be installed there.")
        try:
            stand_in_for_flash_attn(setup)
        except ValueError as error:
            raise _lacking(IMPLEMENTATION, error) from error


def _leave_out_plans(setup: Setup) -> None:
    """Take cuDNN's attention out of PyTorch's choice where shapes vary.

    It is the first choice on Hopper and on Blackwell's data-centre cards (sdp_utils.cpp), and faster there: a B200
    trains 12 % more tokens a second with it than with flash (torchtitan 1196). But it plans anew for each shape, which
    took a second on a B200, of steps of 0.1 s (FunASR 3704); and a probe, whose shape is one, would not show it.
    """
    if setup.workload.varying and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        setup.on_close(lambda: torch.backends.cuda.enable_cudnn_sdp(True))


def _has_flash_attn() -> bool:
    return requirements.installed("flash_attn")


def _set_implementation(setup: Setup, name: str) -> None:
    model: Any = setup.model
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise _lacking(name, error) from error
    setup.on_close(functools.partial(model.set_attn_implementation, before))


def _lacking(name: str, error: Exception) -> RefusedError:
    return RefusedError(f"this model has no {name} attention: {error}")


@contextmanager
def _flash_or_nothing() -> Iterator[None]:
    """PyTorch's flash kernel alone is allowed, around forward and backward; it meets masks and sizes only there."""
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        message = "PyTorch's flash kernel does not take this model's attention (its mask, head size or dropout)."
        raise RefusedError(message, "Use attention sdpa.") from error
