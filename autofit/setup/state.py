"""Setup: a training run being put together. The only mutable object, alive between build and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Hyperparameters, Workload

Context = Callable[[], AbstractContextManager[Any]]
Holder = Callable[[torch.Tensor], nn.Parameter]
Slices = Callable[[int, int, int], Iterator[slice]]  # (tokens, features, vocabulary) -> the tokens of each chunk


@dataclass
class Setup:
    """Everything a training step needs, filled in stage by stage.

    `frozen_dtype` and `trainable_dtype` are what `build` casts weights to once it is known which are trained (None:
    left as they are). `forward_contexts` surround each micro-batch's forward; `step_contexts` surround its forward and
    backward, for what must also hold while checkpointed blocks are computed again.

    `holders` say how a module holds its weight (quantised), given the full values on the device, one weight at a time.
    `make_optimizer` makes another optimizer of the chosen kind for other groups. `stepped_in_backward` is set where
    the backward has applied the gradients already, and tells whether it has since it was last asked. `phase` is what
    the last step came to (forward, backward, update), and `gradient_norm` what it was clipped from, where it is.
    `note_host` is for stand-ins under fake tensors, all of which are on one device: it is told which of them lie in
    the host's memory; `slices` is what they take in place of the chunks of a loss, where not all are wanted;
    `assumptions` are theirs, in sentences.
    """

    workload: Workload
    config: Config
    hardware: Hardware
    device: torch.device
    model: nn.Module
    hyperparameters: Hyperparameters
    frozen_dtype: torch.dtype | None = None
    trainable_dtype: torch.dtype | None = None
    micro_batch_size: int = 1
    holders: dict[nn.Module, Holder] = field(default_factory=dict)
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None
    optimizer: Optimizer | None = None
    stepped_in_backward: Callable[[], bool] | None = None
    scaler: torch.amp.grad_scaler.GradScaler | None = None
    gradient_norm: torch.Tensor | None = None
    phase: str = "forward"
    forward_contexts: list[Context] = field(default_factory=list)
    step_contexts: list[Context] = field(default_factory=list)
    note_host: Callable[[torch.Tensor], Any] = lambda tensor: None
    slices: Slices | None = None
    warnings: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that are trained, each once also where weights are tied."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def on_close(self, undo: Callable[[], None]) -> None:
        """Register what takes a change to the user's model back; run in reverse order by `close`."""
        self._undo.append(undo)

    def close(self) -> None:
        """Give the model back without hooks and wrappers; weights and their dtype stay."""
        while self._undo:
            self._undo.pop()()

    def forward_context(self) -> ExitStack:
        """All forward contexts entered, to be used in a `with`."""
        return _entered(self.forward_contexts)

    def step_context(self) -> ExitStack:
        """All step contexts entered, to be used in a `with`."""
        return _entered(self.step_contexts)


def _entered(contexts: list[Context]) -> ExitStack:
    with ExitStack() as stack:  # which closes those that are open when the next one fails to
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()
