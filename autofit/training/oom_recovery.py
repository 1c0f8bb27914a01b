"""What a training step that ran out of memory is taken back to, and how the next try needs less.

A smaller micro-batch with more accumulation, then full checkpointing: both learn the same thing and leave the
optimizer's state as it is. Never another rank, precision or optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from autofit.core.config import Config
from autofit.core.errors import RefusedError
from autofit.setup import Setup
from autofit.techniques import refuse, technique_named
from autofit.training import random_state

# The knobs that a run may change while it trains.
FALLBACK_KNOBS = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")
_UNWRAPPED = ("compile", "activation_offload", "parameter_offload")  # whose wrappers nothing may be put around later


class Recovery:
    """Takes a step back, and a run down a ladder of configs that need less memory.

    Args:
        splits: whether the loss of a batch may be put together from slices; asked once, before it first has to be.
    """

    def __init__(self, setup: Setup, splits: Callable[[], bool]) -> None:
        self._setup = setup
        self._splits = splits
        self._known_to_split = setup.micro_batch_size < setup.workload.effective_batch_size
        self._statistics = [buffer for buffer in _running_statistics(setup) if buffer.numel()]
        self._kept = [torch.empty_like(buffer) for buffer in self._statistics]
        self._random: dict[str, Any] = {}
        self._versions: list[int] | None = None

    def remember(self) -> None:
        """Keep what a forward changes, before it does: running statistics, and where torch's random numbers stand."""
        if self._statistics:
            torch._foreach_copy_(self._kept, self._statistics)
        self._random = random_state.capture_torch(self._setup.device)
        # Before its first step an optimizer has no state that could be torn.
        optimizer = self._setup.optimizer
        self._versions = None if optimizer is None or optimizer.state else self._weights_versions()

    @torch.no_grad()
    def take_back(self) -> bool:
        """Bring everything to where it was; False where weights or the optimizer's state are half updated.

        To be called when the handler of the exception has been left: it holds frames, and those hold tensors.
        """
        setup = self._setup
        assert setup.optimizer is not None, "build() sets the optimizer"
        torn = setup.phase == "update" or (setup.phase == "backward" and setup.stepped_in_backward is not None)
        if torn and not setup.stepped_in_backward and self._versions == self._weights_versions():
            setup.optimizer.state.clear()  # it was being made, for the first time
            torn = False
        setup.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
        random_state.restore(self._random, setup.device)
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._kept)
        return not torn

    def step_down(self) -> str | None:
        """Go to the next config of the ladder, and say what changed; None at its end."""
        setup = self._setup
        rungs = [self._smaller_micro_batch, self._checkpointing]
        if self._statistics:  # a smaller micro-batch changes what BatchNorm does
            rungs.reverse()
        before = setup.config
        for rung in rungs:
            changed = rung()
            if changed is not None:
                setup.config = changed
                return _difference(before, changed)
        return None

    def _weights_versions(self) -> list[int]:
        return [parameter._version for _, parameter in self._setup.trainable()]

    def _smaller_micro_batch(self) -> Config | None:
        setup = self._setup
        whole = setup.workload.effective_batch_size // setup.hardware.ranks
        half = setup.micro_batch_size // 2
        if half < 1 or setup.stepped_in_backward or not self._may_split():
            return None
        setup.micro_batch_size = max(size for size in range(1, half + 1) if whole % size == 0)
        return setup.config.replace(
            micro_batch_size=setup.micro_batch_size, gradient_accumulation_steps=whole // setup.micro_batch_size
        )

    def _may_split(self) -> bool:
        self._known_to_split = self._known_to_split or self._splits()
        return self._known_to_split

    def _checkpointing(self) -> Config | None:
        setup, knob = self._setup, technique_named("activation_checkpointing")
        wrapped = any(setup.config.get(each, "none") != "none" for each in _UNWRAPPED)
        config = setup.config.replace(activation_checkpointing="full")
        if config == setup.config or wrapped or refuse(config, setup.workload, setup.hardware):
            return None
        try:
            knob.apply(setup, "full")
        except RefusedError:  # a model without repeated blocks
            return None
        return config


def _running_statistics(setup: Setup) -> list[torch.Tensor]:
    norms = [module for module in setup.model.modules() if isinstance(module, _NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def _difference(before: Config, after: Config) -> str:
    if before["micro_batch_size"] != after["micro_batch_size"]:
        cuts = [f"{each['micro_batch_size']}x{each['gradient_accumulation_steps']}" for each in (before, after)]
        return f"micro-batch {cuts[0]} -> {cuts[1]}"
    knob = "activation_checkpointing"
    return f"{knob} {before[knob]} -> {after[knob]}"
