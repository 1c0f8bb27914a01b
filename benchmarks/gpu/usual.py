"""What peers train, in the way that people usually set them up: LoRA on bf16 weights, AdamW, autocast in bf16.

Run in a process of its own for each question: what a tool settles for, and how fast what it settled for is at the
effective batch. Everything here is plain torch, transformers, peft and accelerate; autofit only gives the shapes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from autofit.core.workload import Workload
from autofit.data.batch import map_tensors
from autofit.hardware.out_of_memory import is_out_of_memory
from benchmarks.peer_tools import LR, TOOLS, Machine, Rows, Run, loss_of, machine_of, settle_for

RANK = 16  # as in peers
TRAINER, TORCH, TORCH_CHECKPOINTED = "trainer", "torch defaults", "torch, checkpointing"
_TUNED_MICRO_BATCHES = 4  # timed of each size by hand-tuning
_ROUNDS = 3  # whole steps that are timed, after one that warms up


@dataclass(frozen=True)
class UsualModel:
    """() -> the model, adapted, on the device."""

    factory: Any
    device: str
    checkpointing: bool

    def __call__(self) -> nn.Module:
        """Weights are drawn where they stay, in the format they stay in: in float32 they would not fit the cap."""
        with torch.device(self.device):
            config = self.factory.transformers_config()
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if self.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        lora = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted: nn.Module = get_peft_model(model, lora)
        return adapted


@dataclass(frozen=True)
class UsualLoss:
    """(model, batch) -> its own loss, under autocast, of a batch that may lie on the host."""

    device: str

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """As one writes it."""
        there = map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(**there).loss
        return loss


def usual(workload: Workload, device: str, *, checkpointing: bool) -> Workload:
    """The workload as peers train it."""
    model = UsualModel(workload.model, device, checkpointing)
    return replace(workload, model=model, loss=UsualLoss(device))


def settled(workload: Workload, tool: str, nbytes: int, device: str) -> dict[str, Any]:
    """What a tool settles for within so many bytes."""
    torch.manual_seed(0)
    prepared = usual(workload, device, checkpointing=tool != TORCH)
    return asdict(settle_for(prepared, tool, nbytes, device, {**TOOLS, **_TOOLS}))


def timed(workload: Workload, tool: str, nbytes: int, device: str, micro: int) -> dict[str, Any]:
    """Seconds of whole steps at the effective batch with a micro-batch, and the peak, within so many bytes.

    On a CPU nothing is refused here, because counting every operator takes time of its own.
    """
    torch.manual_seed(0)
    prepared = usual(workload, device, checkpointing=tool != TORCH)
    if device == "cuda":
        machine_of(nbytes, device)
    run = _trainer_steps if tool == TRAINER else _steps
    seconds = run(prepared, micro, _ROUNDS + 1)[1:]
    tokens = workload.effective_batch_size * (workload.sequence_length or 1)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "peak_bytes": peak,
    }


def _steps(
    workload: Workload, micro: int, count: int, micro_batches: int | None = None
) -> list[float]:
    """Seconds of each of so many steps of a plain loop; `micro_batches`: not of all that the effective batch has."""
    model = workload.model().train()
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=LR
    )
    accumulation = min(
        workload.effective_batch_size // micro, micro_batches or workload.effective_batch_size
    )
    batches = iter(DataLoader(Rows(workload), batch_size=micro))
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        total = torch.zeros(())
        for _ in range(accumulation):
            loss = loss_of(workload, model, next(batches)) / accumulation
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        float(total)  # as everybody logs it, which waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds


def _trainer(workload: Workload, folder: str, **arguments: Any) -> Trainer:
    quiet = {
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    given = TrainingArguments(
        output_dir=folder,
        bf16=True,
        learning_rate=LR,
        use_cpu=not torch.cuda.is_available(),
        **quiet,
        **arguments,
    )
    return Trainer(model=workload.model(), args=given, train_dataset=Rows(workload))


def _trainer_finds(workload: Workload, _: Machine, tried: list[int]) -> Run:
    """`auto_find_batch_size`, from the effective batch down."""

    class Tried(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tried.append(state.train_batch_size)

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            size = workload.effective_batch_size
            trainer = _trainer(
                workload,
                folder,
                auto_find_batch_size=True,
                per_device_train_batch_size=size,
                max_steps=2,
            )
            trainer.add_callback(Tried())
            trainer.train()
            return int(trainer.state.train_batch_size)

    return run


def _trainer_steps(workload: Workload, micro: int, count: int) -> list[float]:
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        cut = {"per_device_train_batch_size": micro, "max_steps": count}
        accumulation = workload.effective_batch_size // micro
        trainer = _trainer(workload, folder, gradient_accumulation_steps=accumulation, **cut)
        trainer.add_callback(Ends())
        start = time.perf_counter()
        trainer.train()
    return [after - before for before, after in zip([start, *ends], ends, strict=False)]


def _by_hand(workload: Workload, _: Machine, tried: list[int]) -> Run:
    """From one sample up to what runs out of memory, each timed: the fastest, as somebody would who takes the time."""

    def run() -> int:
        speeds: dict[int, float] = {}
        for micro in divisors(workload.effective_batch_size):
            tried.append(micro)
            try:
                seconds = _steps(workload, micro, 2, _TUNED_MICRO_BATCHES)[1]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                break
            speeds[micro] = (
                micro * min(_TUNED_MICRO_BATCHES, workload.effective_batch_size // micro) / seconds
            )
        if not speeds:
            raise RuntimeError("memory runs out with one sample")
        return max(speeds, key=lambda micro: speeds[micro])

    return run


def divisors(number: int) -> Iterable[int]:
    """From 1 up."""
    return (each for each in range(1, number + 1) if number % each == 0)


_TOOLS: dict[str, Callable[[Workload, Machine, list[int]], Run]] = {
    TRAINER: _trainer_finds,
    TORCH: _by_hand,
    TORCH_CHECKPOINTED: _by_hand,
}
