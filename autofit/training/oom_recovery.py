"""Out-of-memory recovery: roll the step back, retry with a cheaper equivalent config.

A smaller micro-batch with more accumulation, then full checkpointing: both learn the same and leave
the optimizer's state as it is. Never another LoRA rank, precision or optimizer.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from autofit.core.config import Config
from autofit.core.errors import RefusedError
from autofit.core.layout import largest_divisor
from autofit.setup import Setup
from autofit.techniques import refuse, technique_named
from autofit.training import random_state

# The knobs that a run may change while it trains.
FALLBACK_KNOBS = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")


class Recovery:
    """Rolls a step back, and moves the run to configs that need less memory.

    `splits` tells whether the loss of a batch may be summed up from slices; it is asked once,
    before the first split.
    """

    def __init__(self, setup: Setup, splits: Callable[[], bool]) -> None:
        self._setup = setup
        self._splits = splits
        self._may_split = setup.micro_batch_size < setup.workload.effective_batch_size
        self._random: dict[str, Any] = {}
        self._versions: list[int] | None = None

        self._statistics: list[torch.Tensor] = []
        for module in setup.model.modules():
            if isinstance(module, _NormBase):
                buffers = module.buffers(recurse=False)
                self._statistics.extend(buffer for buffer in buffers if buffer.numel())
        self._saved_statistics = list(map(torch.empty_like, self._statistics))

    def snapshot(self) -> None:
        """Save what a forward changes: running statistics, and torch's random state."""
        if self._statistics:
            torch._foreach_copy_(self._saved_statistics, self._statistics)
        self._random = random_state.capture_torch(self._setup.device)
        # Before its first step an optimizer has no state that could be torn.
        self._versions = None
        if not self._setup.optimizer.state:
            self._versions = self._weight_versions()

    @torch.no_grad()
    def roll_back(self) -> bool:
        """Restore the snapshot; False where weights or the optimizer's state are half updated.

        Call it after the exception's handler has returned: its frames hold tensors.
        """
        setup = self._setup
        phase = setup.progress.phase
        steps_in_backward = setup.stepped_in_backward is not None
        is_torn = phase == "update" or (phase == "backward" and steps_in_backward)
        if is_torn and not setup.stepped_in_backward and self._versions == self._weight_versions():
            setup.optimizer.state.clear()  # it was being made, for the first time
            is_torn = False

        setup.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()

        random_state.restore(self._random, setup.device)
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._saved_statistics)
        return not is_torn

    def reduce(self) -> str | None:
        """Move to the next cheaper config, and describe the change; None when there is none."""
        setup = self._setup
        fallbacks = [self._smaller_micro_batch, self._full_checkpointing]
        if self._statistics:  # a smaller micro-batch changes what BatchNorm does
            fallbacks.reverse()

        before = setup.config
        for fallback in fallbacks:
            after = fallback()
            if after is not None:
                setup.config = after
                return _difference(before, after)
        return None

    def _weight_versions(self) -> list[int]:
        """How often each weight was written to."""
        return [parameter._version for _, parameter in self._setup.trainable()]

    def _smaller_micro_batch(self) -> Config | None:
        """At most half the micro-batch; None where it cannot be smaller."""
        setup = self._setup
        whole = setup.workload.effective_batch_size // setup.ranks.layout.dp_degree
        half = setup.micro_batch_size // 2
        if half < 1 or setup.stepped_in_backward:
            return None

        self._may_split = self._may_split or self._splits()
        if not self._may_split:
            return None

        size = largest_divisor(whole, half)
        setup.micro_batch_size = size
        steps = whole // size
        return setup.config.replace(micro_batch_size=size, gradient_accumulation_steps=steps)

    def _full_checkpointing(self) -> Config | None:
        """Full checkpointing; None where it is there already, or refused."""
        setup = self._setup
        before = setup.config
        config = before.replace(activation_checkpointing="full")

        # Nothing may be wrapped later around what these wrap.
        wrappers = {before.compile, before.activation_offload, before.parameter_offload}
        if config == before or wrappers != {"none"}:
            return None
        if refuse(config, setup.workload, setup.hardware):
            return None

        try:
            technique_named("activation_checkpointing").apply(setup, "full")
        except RefusedError:  # a model without repeated blocks
            return None
        return config


def _difference(before: Config, after: Config) -> str:
    """What one of the fallbacks changed, for a message."""
    if before.micro_batch_size != after.micro_batch_size:
        old = f"{before.micro_batch_size}x{before.gradient_accumulation_steps}"
        new = f"{after.micro_batch_size}x{after.gradient_accumulation_steps}"
        return f"micro-batch {old} -> {new}"

    old = before.activation_checkpointing
    new = after.activation_checkpointing
    return f"activation_checkpointing {old} -> {new}"
