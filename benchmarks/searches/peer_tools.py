"""What other tools settle for in the same memory: their own functions, run for real, by their own rules and defaults.

Each of these searches one knob, the batch size, for the largest that does not run out of memory. What that is on a CPU
is autofit's: the bytes of live tensors, counted at every operator. Beyond the budget an operator fails as it does where
PyTorch's own allocator finds nothing left, which these tools know by its text. On a card it is PyTorch's own cap.
`benchmarks.peers` holds what they settle for against what autofit finds; DeepSpeed, which starts its own processes, is
in `benchmarks.peer_deepspeed`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autofit.core.workload import Workload
from autofit.data.batch import map_tensors
from autofit.hardware.tracker import BudgetExceededError, StorageTracker

LR = 1e-4
LENGTH = 65_536  # of the data: more than any of the tools could want in one batch
_STEPS = 2  # of the optimizer: its state exists only after the first
_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
_REFUSAL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
)

Run = Callable[[], int]  # the tool's own function, which returns a batch size


@dataclass(frozen=True)
class Found:
    """The batch size that a tool settled for, or None and the reason; the sizes it tried, and what that took."""

    batch_size: int | None
    tried: tuple[int, ...]
    out_of_memory: int
    seconds: float
    reason: str | None = None


class SmallMachine(StorageTracker):
    """A machine with room for so many bytes of tensors: what goes beyond fails as in PyTorch's allocator.

    `refusals` counts these failures.
    """

    accelerator = "cpu"

    def __init__(self, nbytes: int) -> None:
        super().__init__(limit=nbytes)
        self.refusals = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except BudgetExceededError:
            needed = self.live
        self.refusals += 1
        self.peak = 0  # or a next try would be refused only where it needs more than this one did
        raise _refusal(needed)


def _refusal(nbytes: int) -> RuntimeError:
    """Raised where it is made, by a line without the word that DeepSpeed looks for: so that it finds the message."""
    return RuntimeError(_REFUSAL.format(nbytes))


class CappedCard:
    """The card with a cap on what this process may take of it; the same words of a machine."""

    accelerator = "cuda"

    def __init__(self, nbytes: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), 0)
        self.limit: int | None = nbytes

    def __enter__(self) -> CappedCard:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def refusals(self) -> int:
        """How often memory ran out in this process."""
        return int(torch.cuda.memory_stats().get("num_ooms", 0))


Machine = SmallMachine | CappedCard


def machine_of(nbytes: int, device: str) -> Machine:
    """Room for so many bytes on a device."""
    return CappedCard(nbytes) if device == "cuda" else SmallMachine(nbytes)


class Rows(Dataset[Any]):
    """The samples of one effective batch, over and over."""

    def __init__(self, workload: Workload) -> None:
        self.samples = workload.effective_batch_size
        self.batch = workload.batch(self.samples)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, place: int) -> Any:
        return map_tensors(
            self.batch, lambda tensor: tensor[place % self.samples] if tensor.dim() else tensor
        )


def loss_of(workload: Workload, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss as a user of these tools would write it."""
    loss: torch.Tensor = workload.loss(model, batch) if workload.loss else model(**batch).loss
    return loss


def settle_for(
    workload: Workload,
    name: str,
    nbytes: int,
    device: str = "cpu",
    tools: Mapping[str, Tool] | None = None,
) -> Found:
    """Let the tool of that name choose within so many bytes of tensors; to be called in a process of its own."""
    tried: list[int] = []
    machine = machine_of(nbytes, device)
    # what it imports is not part of its time
    run = (tools or TOOLS)[name](workload, machine, tried)
    size, reason = None, None
    start = time.monotonic()
    with machine:
        try:
            size = run()
        # each tool has its own way to say that nothing fits
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
    return Found(size, tuple(tried), machine.refusals, time.monotonic() - start, reason)


def _accelerate(workload: Workload, _: Machine, tried: list[int]) -> Run:
    """Down from the effective batch, with as much accumulation as that takes."""

    @find_executable_batch_size(starting_batch_size=workload.effective_batch_size)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model = workload.model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        accumulation = max(1, workload.effective_batch_size // batch_size)
        batches = iter(DataLoader(Rows(workload), batch_size=batch_size))
        for _ in range(_STEPS):
            for _ in range(accumulation):
                (loss_of(workload, model, next(batches)) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    run: Run = train
    return run


def _lightning(workload: Workload, machine: Machine, tried: list[int], *, mode: str) -> Run:
    """`Tuner.scale_batch_size` in one of its modes."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.tuner import Tuner

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model()
            self.rows = Rows(workload)
            self.batch_size = 1

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.rows, batch_size=self.batch_size)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            if tried[-1:] != [self.batch_size]:
                tried.append(self.batch_size)
            return loss_of(workload, self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    class Files(TorchCheckpointIO):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            machine.limit = None  # after its last try; where there is a device, host memory takes what it restores
            return super().load_checkpoint(*args, **kwargs)

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                accelerator=machine.accelerator,
                devices=1,
                default_root_dir=folder,
                plugins=[Files()],
                **_QUIET,
            )
            size: int = Tuner(trainer).scale_batch_size(Module(), mode=mode)
        return size

    return run


Tool = Callable[[Workload, Machine, list[int]], Run]
TOOLS: dict[str, Tool] = {
    "accelerate": _accelerate,
    "lightning": partial(_lightning, mode="power"),
    "lightning-binsearch": partial(_lightning, mode="binsearch"),
}
# that autofit does not bring along
PACKAGES = {"lightning": "lightning", "lightning-binsearch": "lightning"}
