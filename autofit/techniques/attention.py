"""attention: how softmax(QK)V is computed.

FlexAttention is no value: PyTorch 2.13 has no backward of it on a CPU, so that nothing here could
show that it trains. Packed samples are kept apart without it, by the masks of sdpa and by
flash-attn. Nor are kernels of the hub, which transformers downloads by their name when a model is
loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.knobs.attention import KNOB
from autofit.setup import (
    Config,
    Hardware,
    RefusedError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
    requirements,
)
from autofit.setup.flash_attn import IMPLEMENTATION, stand_in_for_flash_attn

_AMPERE = (8, 0)  # first compute capability that FlashAttention-2 supports


class Attention(Technique):
    """`sdpa`: the framework's choice, without cuDNN's where shapes vary.

    `eager`: plain matrix products, which hold the whole score matrix. `flash`: FlashAttention-2
    (Dao 2023, arXiv 2307.08691) or nothing: flash-attn's where it is installed and the model
    supports it, else PyTorch's own copy. null where the model has no attention to choose.
    """

    record = KNOB
    stage = Stage.BLOCKS
    cuda_values = ("flash",)
    all_exact = True
    always = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if workload.traits is None or workload.traits.sdpa:
            return config[self.name] or self.off
        return None

    def package(self, value: Value) -> str:
        if value == "flash" and _has_flash_attn():
            return "flash-attn"
        return "torch"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != "flash":
            return None

        if hardware.device == "cpu":
            return (
                "flash needs CUDA; use sdpa, which on a CPU takes PyTorch's flash kernel already."
            )
        if lacking := requirements.too_old(hardware, _AMPERE):
            return f"flash needs {lacking}; use sdpa."

        if workload.document_tokens and not (config.micro_batch_size == 1 and _has_flash_attn()):
            return (
                "flash keeps packed samples from seeing one another by flash-attn alone, in "
                "micro-batches of one sequence; install that and set micro_batch_size 1, or use "
                "sdpa."
            )

        if config.precision in ("fp32", "tf32"):
            return (
                f"flash computes in 16 bits only, not in {config.precision}; set precision bf16 or "
                "bf16-mixed."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value is None:
            return
        if value == self.off:
            _avoid_cudnn_where_shapes_vary(setup)
            return

        named = hasattr(setup.model, "set_attn_implementation")
        if value == "flash" and not (named and _has_flash_attn()):
            if named:  # a model with another implementation would not call PyTorch's
                _set_implementation(setup, "sdpa")
            setup.step_contexts.append(_flash_or_nothing)
        elif named:
            _set_implementation(setup, IMPLEMENTATION if value == "flash" else str(value))
        else:
            # Around forward and backward: recomputing a checkpointed block must take the same
            # path.
            setup.step_contexts.append(lambda: sdpa_kernel(SDPBackend.MATH))

    def trace(self, setup: Setup, value: Value) -> None:
        """flash-attn has a stand-in, and need not be installed: another machine's card is assumed
        to have it."""
        planned = not setup.hardware.here
        named = hasattr(setup.model, "set_attn_implementation")
        if value != "flash" or not named or not (planned or _has_flash_attn()):
            self.apply(setup, value)
            return

        if planned:
            setup.tracing.assumptions.append(
                "attention flash is that of flash-attn, which is to be installed there."
            )
        try:
            stand_in_for_flash_attn(setup)
        except ValueError as error:
            raise _unsupported(IMPLEMENTATION, error) from error


def _avoid_cudnn_where_shapes_vary(setup: Setup) -> None:
    """Exclude cuDNN's attention from PyTorch's choice where shapes vary.

    It is the first choice on Hopper and on Blackwell's data-centre cards (sdp_utils.cpp), and
    faster there: a B200 trains 12 % more tokens a second with it than with flash (torchtitan 1196).
    But it plans anew for each shape, which took a second on a B200, of steps of 0.1 s (FunASR
    3704); a probe, which sees one shape, would not show it.
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
        raise _unsupported(name, error) from error
    setup.on_close(lambda: model.set_attn_implementation(before))


def _unsupported(name: str, error: Exception) -> RefusedError:
    return RefusedError(f"this model has no {name} attention: {error}")


@contextmanager
def _flash_or_nothing() -> Iterator[None]:
    """Allow only PyTorch's flash kernel, around forward and backward; masks and sizes are checked
    when it runs."""
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise RefusedError(
            "PyTorch's flash kernel does not support this model's attention (its mask, head size "
            "or dropout).",
            "Use attention sdpa.",
        ) from error
