"""torchao's AdamWs, adapted: with state in 4 or 8 bits, or bf16 weights that they round
stochastically; and what stands in for their compiled steps under fake tensors."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autofit.setup.master_weights import KeepsFormats
from autofit.setup.state import Setup

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Kind(NamedTuple):
    """torchao's class, and whether it rounds bf16 weights up or down at random, so that updates
    count in the mean."""

    name: str
    rounds: bool = False


_KINDS = {
    "adamw-4bit": _Kind("AdamW4bit"),
    "adamw-fp8": _Kind("AdamWFp8"),
    "adamw-sr": _Kind("_AdamW", rounds=True),
    "adamw-8bit-sr": _Kind("AdamW8bit", rounds=True),
}


@functools.cache
def torchao_adamw(value: str) -> Callable[..., Optimizer]:
    """What makes the optimizer of this name for groups of parameters."""
    from torchao import optim

    kind = _KINDS[value]
    bases: list[Any] = [_LowBit]
    if value == "adamw-sr":
        bases.append(_InFp32)
    bases.append(getattr(optim, kind.name))
    adapted: Any = type(kind.name, tuple(bases), {})

    if kind.rounds:
        return functools.partial(adapted, bf16_stochastic_round=True)
    return functools.partial(adapted)


class _LowBit(Optimizer):
    """Adapts torchao's optimizers: learning rates are numbers, as the loop expects, not tensors.

    torch.compile must take their step whole, and raises where an active dispatch mode (a tracker of
    storage) forbids compilation: then the same function runs uncompiled.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    def _subclass_zeros(self, weight: torch.Tensor, signed: bool, block_size: int) -> Any:
        """A moment that passes as fp32.

        One that passes as bf16 fails within a DTensor, whose operators then differ about its format
        (torchao 0.18).
        """
        theirs: Any = super()
        in_fp32 = weight.new_empty((), dtype=torch.float32).expand_as(weight)
        return theirs._subclass_zeros(in_fp32, signed, block_size)

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            # as a number, each would be a new graph
            group["lr"] = torch.tensor(rate, dtype=torch.float32)

        context: AbstractContextManager[Any] = nullcontext()
        if _is_watched():
            context = torch.compiler.set_stance("force_eager")

        try:
            with context:
                return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


def _is_watched() -> bool:
    """Whether a dispatch mode is active that forbids compilation."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    for mode in modes:
        ignores = getattr(mode, "ignore_compile_internals", None)
        if ignores is None or not ignores():
            return True
    return False


class _InFp32(KeepsFormats):
    """torchao's plain AdamW with moments in fp32.

    Its own are in the weights' format, and in bf16 a second moment never falls: a step takes a
    thousandth of it away, less than bf16 can tell.
    """

    def _new_buffer(self, weight: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(weight, dtype=torch.float32)


def _of_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that ranks divide; without ranks, all of it."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


@dataclass(frozen=True)
class _Format:
    """How torchao stores a moment, and the temporaries of its compiled step.

    Temporaries were read from the allocator during steps compiled by Inductor for a CPU (torch
    2.13, torchao 0.18, 2^20 elements, fp32 and bf16 weights): new scales for both moments, and 26
    bytes per element for `adamw-4bit`, 8 for `adamw-8bit-sr`.
    """

    dtype: torch.dtype
    per_code: int  # elements of a moment
    block: int  # elements that share a scale; 0: none do
    table: int  # fp32 numbers that codes stand for
    temporary: int  # bytes per element


_FORMATS = {
    "adamw-4bit": _Format(torch.uint8, per_code=2, block=128, table=16, temporary=26),
    "adamw-8bit-sr": _Format(torch.uint8, per_code=1, block=256, table=256, temporary=8),
    "adamw-fp8": _Format(torch.float8_e4m3fn, per_code=1, block=256, table=0, temporary=0),
    "adamw-sr": _Format(torch.float32, per_code=1, block=0, table=0, temporary=0),
}
_SMALLEST_LOW_BIT = 4096  # elements: torchao, optim/adam.py, _new_buffer


def torchao_stand_in(value: str, setup: Setup) -> Callable[..., Optimizer]:
    """What takes the memory of the optimizer of this name on fake tensors, which cannot be compiled
    for."""
    return functools.partial(_StandIn, low=_FORMATS[value], on_cpu=setup.hardware.device == "cpu")


class _StandIn(Optimizer):
    """torchao's optimizers on fake tensors: their state, their temporaries, and the bytes they
    touch; `on_cpu`: with what they keep on the host, the numbers of steps and the learning
    rates."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, low: _Format, on_cpu: bool
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self._low = low
        self._on_cpu = on_cpu

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # until all are stepped
        rates = [torch.tensor(group["lr"]) for group in self.param_groups if self._on_cpu]

        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(self.state[weight], _of_rank(weight), _of_rank(weight.grad))
        del rates

    def _step(self, state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Allocate and touch what the step of one weight does."""
        low = self._low
        is_small = weight.numel() < _SMALLEST_LOW_BIT
        if low.block and weight.numel() % low.block:
            is_small = True

        if self._on_cpu and "step" not in state:
            state["step"] = torch.tensor(0.0)
        for moment in _MOMENTS:
            if moment not in state:
                state[moment] = self._moment(weight, is_small)

        temporaries = []
        if not is_small:
            # they are written
            temporaries.append(weight.new_zeros(weight.numel() * low.temporary, dtype=torch.uint8))
            temporaries += [torch.empty_like(state[moment][1]) for moment in _MOMENTS]
        weight.add_(gradient)
        for moment in _MOMENTS:
            state[moment][0].zero_()

    def _moment(self, weight: torch.Tensor, is_small: bool) -> list[torch.Tensor]:
        """A moment in the low format, with its scales and its table; plain for a small weight."""
        low = self._low
        if is_small:
            return [torch.zeros_like(weight, dtype=None if low.block else low.dtype)]

        count = weight.numel()
        blocks = count // low.block if low.block else 0
        scales = weight.new_zeros(blocks, dtype=torch.float32)
        table = weight.new_zeros(low.table, dtype=torch.float32)
        return [weight.new_zeros(count // low.per_code, dtype=low.dtype), scales, table]
