"""compile: torch.compile, block by block where the model repeats one: identical blocks share one
compiled code. PyTorch calls this regional compilation: the compile time no longer grows with the
depth."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.core.knobs.compile import KNOB
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
from autofit.setup.layers import repeated_blocks

# Tests that need no generated code use aot_eager: captured and partitioned, run as it was.
BACKEND = "inductor"
_VOLTA = (7, 0)  # first compute capability that Triton supports
_RECOMPILATIONS = 8  # PyTorch's own limit, here granted to every block


class Compile(Technique):
    """`default`: Inductor. `max-autotune-no-cudagraphs`: it also benchmarks several kernels per
    matrix product.

    It works on a CPU but is not searched there: on 2 cores the first step of tiny-llama (8 x 256
    tokens, compiled by block) took 22.8 s, 2.3 s with Inductor's cache filled by an earlier run,
    where a whole uncompiled probe takes 2 to 4 s; later steps took 0.59 s instead of 0.80 s, with
    either value.
    """

    record = KNOB
    stage = Stage.COMPILE
    cuda_values = compiled_values = ("default", "max-autotune-no-cudagraphs")
    all_exact = True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off or (BACKEND != "inductor" and hardware.device == "cpu"):
            return None
        if hardware.device == "cuda" and (lacking := requirements.too_old(hardware, _VOLTA)):
            return f"Triton needs {lacking}; use none."
        if hardware.here and (lacking := requirements.no_compiler(hardware.device)):
            return f"{lacking}, or use none."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        blocks = repeated_blocks(setup.model) or [setup.model]

        # All blocks share one cache of compiled code; past its limit torch.compile silently runs
        # plain code.
        config: Any = torch._dynamo.config
        limit = _RECOMPILATIONS * len(blocks)
        patch = config.patch(
            recompile_limit=max(config.recompile_limit, limit),
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, limit),
        )

        patch.__enter__()
        setup.on_close(lambda: patch.__exit__(None, None, None))
        # Compiled code keeps its model alive, and the next run of the same class would find it.
        setup.on_close(torch._dynamo.reset)

        # Not by `block.compile()`: it silently skips blocks whose forward is torch.nn's own (a
        # Sequential, a TransformerEncoderLayer), because torch.compile skips the frames of
        # torch.nn.
        mode = str(value) if BACKEND == "inductor" else None
        for block in blocks:
            setup.patch(block, "forward", torch.compile(block.forward, backend=BACKEND, mode=mode))
        setup.step_contexts.append(_failures_refused)


@contextmanager
def _failures_refused() -> Iterator[None]:
    """Turn a failure to compile, which shows at the first step only, into a refusal of the
    config."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        cause = error.inner_exception
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            raise cause from error

        first_line = str(cause).strip().partition("\n")[0]
        raise RefusedError(
            f"the compiler failed on this model ({type(cause).__name__}: {first_line}).",
            "Use compile none.",
        ) from error
