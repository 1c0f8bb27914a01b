"""activation_checkpointing: keep only what enters a block, and compute its inside again in the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique
from autofit.setup.blocks import repeated_blocks

_NO_BLOCKS = "the model has no repeated blocks (a ModuleList or Sequential of layers) to checkpoint; use none."


class ActivationCheckpointing(Technique):
    """`full`: every repeated block is computed again in the backward."""

    name = "activation_checkpointing"
    stage = Stage.BLOCKS
    off = "none"
    values = ("none", "full")

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != self.off and workload.traits and not workload.traits.blocks:
            return _NO_BLOCKS
        return None

    def memory_order(self, value: Value) -> int | None:
        """Shown for the networks of the tests, not for any: a block whose forward needs more for a moment, without
        gradients, than all other blocks keep would need that memory again beside the gradients."""
        return {"full": 0, "none": 1}[str(value)]

    def apply(self, setup: Setup, value: Value) -> None:
        blocks = repeated_blocks(setup.model)
        if not blocks:
            raise RefusedError(_NO_BLOCKS)
        _stop_caching(setup)
        for block in blocks:
            setup.on_close(_checkpoint(block))


def _checkpoint(block: nn.Module) -> Callable[[], None]:
    """Wrap the block's forward; returns what takes that back."""
    own = block.__dict__.get("forward")  # of an instance somebody else has wrapped already
    inner = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            inner, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _statistics_held(norms)), **kwargs
        )

    block.forward = forward  # the instance's own attribute, over the class's method
    return functools.partial(setattr, block, "forward", own) if own else functools.partial(delattr, block, "forward")


@contextmanager
def _statistics_held(norms: list[_NormBase]) -> Iterator[None]:
    """Let a recomputation leave running statistics alone: the forward has counted these samples already."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _stop_caching(setup: Setup) -> None:
    """A key/value cache filled in the forward would be filled again in the recomputation, with other shapes."""
    config = getattr(setup.model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        setup.on_close(lambda: setattr(config, "use_cache", True))
