"""What each optimizer step of this process takes, whoever wrote its loop: loss, tracked peak, bytes of the state.

It hangs on PyTorch's own hooks, so a tool's command runs unchanged. It needs torch alone, for it runs in environments
that autofit is not installed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.hardware.tracker import StorageTracker

_COPY = "master"  # of the weights, which DeepSpeed keeps elsewhere


class StepWatch:
    """Writes a line for each step to a file of this rank."""

    def __init__(self, folder: str) -> None:
        self.folder, self.tracker, self.losses = Path(folder), StorageTracker(), list[float]()
        self.backward = torch.autograd.backward

    def note_loss(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        """`torch.autograd.backward`, which every loss goes through, and checkpoints inside of it."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(given) == 1 and given[0].numel() == 1:
            self.losses.append(float(given[0].detach()))
        self.backward(tensors, *arguments, **options)

    def leave_compiled(self, optimizer: Optimizer, *_: Any) -> None:
        """A step that compiles itself cannot be watched: its scratch memory is not counted."""
        if _compiles(optimizer):
            self.tracker.__exit__(None, None, None)

    def note_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A line: the peak is of what came after the step before."""
        values = [
            state[name] for state in optimizer.state.values() for name in state if name != _COPY
        ]
        if _compiles(optimizer):
            self.tracker.__enter__()
            self.tracker.see(values)
        line = {
            "loss": sum(self.losses),
            "micro_batches": len(self.losses),
            "peak_bytes": self.tracker.peak,
            "live_bytes": self.tracker.live,
            "state_bytes": nbytes(value for value in values if isinstance(value, torch.Tensor)),
            "optimizer": type(optimizer).__name__,
        }
        with (self.folder / f"rank{os.environ.get('RANK', 0)}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.losses.clear()
        self.tracker.reset_peak()


def _compiles(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torchao.")


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages below tensors that may wrap others: quantised ones, parts of divided ones."""
    sizes, rest = dict[int, int](), list(tensors)
    while rest:
        tensor: Any = rest.pop()
        if is_traceable_wrapper_subclass(tensor):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            # a DTensor has its mesh there, too
            rest += [each for each in inner if isinstance(each, torch.Tensor)]
        else:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def watch(folder: str) -> None:
    """From here on, in this thread, until the process ends."""
    steps = StepWatch(folder)
    steps.tracker.__enter__()
    torch.autograd.backward = steps.note_loss
    register_optimizer_step_pre_hook(steps.leave_compiled)
    register_optimizer_step_post_hook(steps.note_step)
