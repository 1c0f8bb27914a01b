"""compile: torch.compile, block by block where the model repeats one: identical blocks then share one compiled code.

Compiling a repeated block once instead of the whole network is what PyTorch calls regional compilation: the time it
takes no longer grows with the depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.blocks import repeated_blocks

BACKEND = "inductor"  # tests that need no generated code take aot_eager: captured and partitioned, run as it was
_VOLTA = (7, 0)  # first compute capability that Triton supports
_RECOMPILATIONS = 8  # PyTorch's own limit, granted to every block


class Compile(Technique):
    """`default`: Inductor. `max-autotune-no-cudagraphs`: it also times several kernels for every matrix product.

    On a CPU it works and is not searched: on 2 cores the first step of tiny-llama (8 x 256 tokens, compiled by block)
    took 22.8 s, 2.3 s when an earlier run had filled Inductor's cache, where a whole uncompiled probe takes 2 to 4 s;
    the steps after it took 0.59 s instead of 0.80 s, with either value.
    """

    name = "compile"
    stage = Stage.COMPILE
    off = "none"
    values = ("none", "default", "max-autotune-no-cudagraphs")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return self.values if hardware.device == "cuda" else (self.off,)

    def package(self, value: Value) -> str:
        return "torch"

    def compiles(self, value: Value) -> bool:
        return value != self.off

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if BACKEND != "inductor" and hardware.device == "cpu":
            return None
        lacking = requirements.no_compiler(hardware.device) if hardware.here else None
        return _too_old(hardware) or (f"{lacking}, or use none." if lacking else None)

    def apply(self, setup: Setup, value: Value) -> None:
        blocks = repeated_blocks(setup.model) or [setup.model]
        _allow_recompilations(setup, len(blocks))
        setup.on_close(_forget_compiled_code)
        for block in blocks:
            setup.on_close(_compile(block, str(value)))
        setup.step_contexts.append(_failures_refused)


def _compile(block: nn.Module, mode: str) -> Callable[[], None]:
    """Compile the block's forward, at its first call; returns what takes that back.

    Not by `block.compile()`: that leaves blocks whose forward is torch.nn's own (a Sequential, a
    TransformerEncoderLayer) as they are and says nothing, because torch.compile skips the frames of torch.nn.
    """
    own = block.__dict__.get("forward")  # of a block that is checkpointed, or that somebody else has wrapped
    block.forward = torch.compile(block.forward, backend=BACKEND, mode=mode if BACKEND == "inductor" else None)
    return functools.partial(setattr, block, "forward", own) if own else functools.partial(delattr, block, "forward")


def _allow_recompilations(setup: Setup, blocks: int) -> None:
    """All blocks share one cache of compiled codes; past its limit torch.compile silently goes back to plain code."""
    config: Any = torch._dynamo.config
    limits = {
        "recompile_limit": max(config.recompile_limit, _RECOMPILATIONS * blocks),
        "accumulated_recompile_limit": max(config.accumulated_recompile_limit, _RECOMPILATIONS * blocks),
    }
    patch = config.patch(limits)
    patch.__enter__()
    setup.on_close(lambda: patch.__exit__(None, None, None))


def _forget_compiled_code() -> None:
    """Compiled code holds on to the model it was made for, and would be found by the next run of the same class."""
    torch._dynamo.reset()


@contextmanager
def _failures_refused() -> Iterator[None]:
    """The compiler meets the model at the first step only; what it cannot compile is a config that cannot be."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        cause = error.inner_exception
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            raise cause from error
        first_line = str(cause).strip().partition("\n")[0]
        message = f"the compiler failed on this model ({type(cause).__name__}: {first_line})."
        raise RefusedError(message, "Use compile none.") from error


def _too_old(hardware: Hardware) -> str | None:
    if hardware.device == "cuda" and hardware.capability and hardware.capability < _VOLTA:
        capability = ".".join(str(part) for part in hardware.capability)
        return f"Triton needs compute capability 7.0, {hardware.name} has {capability}; use none."
    return None
