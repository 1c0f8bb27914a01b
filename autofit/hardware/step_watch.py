"""What each optimizer step of a process takes, whoever wrote its loop: time, peak, loss, bytes of
the optimizer's state.

It hangs on PyTorch's own hooks, so the command of another tool runs unchanged. It needs torch
alone, for it runs in environments that autofit is not installed in: `watch/sitecustomize.py` loads
it there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COPY = "master"  # of the weights, which DeepSpeed keeps elsewhere
_NEAR_MISS = 1.5  # as in a probe, a run over its cap goes on up to here, so that it has a peak


class Tracker(AbstractContextManager[Any], Protocol):
    """`autofit.hardware.tracker.StorageTracker`, which is imported by its file there."""

    peak: int
    live: int
    limit: int | None

    def see(self, value: Any) -> None: ...

    def reset_peak(self) -> None: ...


class Record(AbstractContextManager[Any], Protocol):
    """`autofit.hardware.tracker.AllocationRecord`, for steps that compile."""

    peak: int


class StepWatch:
    """Writes a line for each step to a file of this rank.

    Args:
        folder: for these files.
        tracker: counts the bytes of tensors on a CPU; None on CUDA, whose allocator counts them.
        tracked: the steps whose bytes are counted; those after them are as fast as they are by
            themselves. None: all.
        last: the step after which the process ends; None: when its own work is done.
        record: counts the bytes of steps that compile, which a tracker would keep from it: of those
            after the first, up to the last one tracked, together.
    """

    def __init__(
        self,
        folder: Path,
        tracker: Tracker | None,
        *,
        tracked: int | None,
        last: int | None,
        record: Record | None = None,
    ) -> None:
        self.folder = folder
        self.tracker = tracker
        self.record = record
        self.held = 0  # bytes, when the record began
        self.tracked = tracked
        self.last = last
        self.steps = 0
        self.losses: list[float] = []
        self.began = time.perf_counter()
        self.backward = torch.autograd.backward

    def note_loss(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        """`torch.autograd.backward`, which every loss goes through, and checkpoints inside of
        it."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if self.counts and len(given) == 1 and given[0].numel() == 1:
            self.losses.append(float(given[0].detach()))
        self.backward(tensors, *arguments, **options)

    @property
    def counts(self) -> bool:
        """Whether this step is one whose bytes are counted."""
        return self.tracked is None or self.steps < self.tracked

    def leave_compiled(self, optimizer: Optimizer, *_: Any) -> None:
        """A step that compiles itself cannot be watched: its scratch memory is not counted."""
        if _compiles(optimizer) and self.tracker and self.counts:
            self.tracker.__exit__(None, None, None)

    def note_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A line: the peak is of what came after the step before."""
        values = []
        for state in optimizer.state.values():
            values += [state[name] for name in state if name != _COPY]
        if _compiles(optimizer) and self.tracker and self.counts:
            self.tracker.__enter__()
            self.tracker.see(values)

        line: dict[str, Any] = {"tracked": self.counts}
        if self.record is not None:
            line["peak_bytes"] = self._recorded(self.record)
        elif self.tracker is None:
            torch.cuda.synchronize()
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
            line["reserved_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        else:
            line["peak_bytes"] = self.tracker.peak
            line["live_bytes"] = self.tracker.live
            self.tracker.reset_peak()
        line |= {
            "seconds": time.perf_counter() - self.began,
            "total_loss": sum(self.losses),
            "micro_batches": len(self.losses),
            "state_bytes": nbytes(value for value in values if isinstance(value, torch.Tensor)),
            "optimizer_name": type(optimizer).__name__,
        }
        self.write(line)

        was_counted = self.counts
        self.steps += 1
        self.losses.clear()
        if self.tracker and was_counted and not self.counts:
            self.tracker.__exit__(None, None, None)
        if self.steps == self.last:  # without what a tool saves in the end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self.began = time.perf_counter()

    def _recorded(self, record: Record) -> int | None:
        """The peak of the steps that are recorded, when the last of them is done."""
        if self.steps == 0:
            self.held = living_bytes()
            record.__enter__()
        elif self.steps + 1 == self.tracked:
            record.__exit__(None, None, None)
            return self.held + record.peak
        return None

    def note_error(self, kind: type[BaseException]) -> None:
        """A line where a process ends because it has no memory left."""
        is_over = kind.__name__ == "BudgetExceededError"
        if is_over or issubclass(kind, torch.OutOfMemoryError):
            self.write({"out_of_memory": True})

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line to the file of this rank."""
        with (self.folder / f"rank{os.environ.get('RANK', 0)}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _compiles(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torchao.")


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages below tensors that may wrap others: quantised ones, parts of divided ones."""
    sizes: dict[int, int] = {}
    rest = list(tensors)
    while rest:
        tensor: Any = rest.pop()
        if is_traceable_wrapper_subclass(tensor):
            names = tensor.__tensor_flatten__()[0]
            inner = (getattr(tensor, name) for name in names)
            # a DTensor has its mesh there, too
            rest += [value for value in inner if isinstance(value, torch.Tensor)]
        else:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def living_bytes() -> int:
    """Of all tensors that this process holds, but for gradients: a record that begins after a step
    sees new ones, and not that the old ones are freed."""
    found: list[torch.Tensor] = []
    gradients: set[int] = set()
    for thing in gc.get_objects():
        kind = type(thing)  # a proxy of what is gone has no class to ask for
        is_real = issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
        if is_real and not thing.is_meta:
            found.append(thing)
            if thing.is_leaf and thing.grad is not None:
                gradients.add(thing.grad.untyped_storage()._cdata)
    return nbytes(
        tensor
        for tensor in found
        if is_traceable_wrapper_subclass(tensor) or tensor.untyped_storage()._cdata not in gradients
    )


def watch(
    environment: Mapping[str, str],
    tracker: Callable[[], Tracker],
    record: Callable[[], Record],
) -> None:
    """From here on, in this thread, until the process ends.

    Args:
        environment: WATCHED_STEPS, the folder to write to; WATCHED_TRACKED and WATCHED_LAST as
            `tracked` and `last` of StepWatch; WATCHED_CAP, the bytes that may be used;
            WATCHED_DEVICE, "cpu" unless it is "cuda"; WATCHED_COMPILES, on a CPU, where its steps
            compile.
    """

    def number(name: str) -> int | None:
        if name not in environment:
            return None
        return int(environment[name])

    on_cuda = environment.get("WATCHED_DEVICE") == "cuda"
    compiles = "WATCHED_COMPILES" in environment
    cap = number("WATCHED_CAP")
    steps = StepWatch(
        Path(environment["WATCHED_STEPS"]),
        None if on_cuda or compiles else tracker(),
        tracked=number("WATCHED_TRACKED"),
        last=number("WATCHED_LAST"),
        record=record() if compiles else None,
    )
    if steps.tracker:
        steps.tracker.limit = None if cap is None else int(cap * _NEAR_MISS)
        steps.tracker.__enter__()
    elif on_cuda and cap is not None:
        _limit_cuda(cap)

    torch.autograd.backward = steps.note_loss
    register_optimizer_step_pre_hook(steps.leave_compiled)
    register_optimizer_step_post_hook(steps.note_step)
    report = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        steps.note_error(kind)
        report(kind, error, trace)

    sys.excepthook = excepthook


def _limit_cuda(cap: int) -> None:
    """Let the allocator hand out no more than a cap, from when the process begins to use CUDA: a
    launcher, which is a process as well, never does."""

    def limit() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))

    torch.cuda._lazy_call(limit)
