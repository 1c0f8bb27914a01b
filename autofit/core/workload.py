"""Workload: what to train, apart from how; and the hyperparameters, which autofit never changes.

A Workload is three factories and the batch that defines the learning. Probe processes call them, so they must survive
cloudpickle; nothing here imports torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.errors import InputError, shown

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "image-classification", "custom")
CLASSIFICATION_TASKS = ("sequence-classification", "image-classification")  # their heads are new: trained whole
MOST_SAMPLES = 2**20  # of an effective batch: whose divisors are micro-batches
SCHEDULES = ("constant", "cosine", "linear")
CLASS_SUFFIXES = {  # of the names of transformers' classes
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForImageClassification": "image-classification",
}


def task_of(model: object) -> str | None:
    """The task of a transformers model, by the name of its class; None for any other."""
    name = type(model).__name__
    return next((task for suffix, task in CLASS_SUFFIXES.items() if name.endswith(suffix)), None)


@dataclass(frozen=True)
class Traits:
    """Properties of a model and its loss (made by `training.inspect`, in a probe process)."""

    parameters: int
    blocks: int  # repeated ones, which checkpointing and regional compilation work on
    linears: int
    attention: bool  # whether attention modules hold linear layers
    sdpa: bool  # whether the forward calls PyTorch's fused attention
    batch_norm: bool  # whether slices of a batch change the statistics of normalisation layers
    dropout: bool
    head: bool = False  # a transformers model's cross-entropy over a linear head: `loss` need not hold all logits
    splits: bool = True  # whether the loss of a batch is the weighted mean of its slices' losses
    notes: tuple[str, ...] = ()
    # Equal for workloads that take the same memory and time; None where user code cannot be compared.
    fingerprint: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Workload:
    """A model factory, a batch factory, a loss and what it averages over, and the batch that defines the learning.

    Args:
        model: () -> nn.Module; called with parameters on the meta device, so it need not be cheap in memory.
        batch: n -> a batch of n samples (dim 0 of every tensor) of the largest shape the data can produce.
        loss: (model, batch) -> scalar; default `model(**batch).loss`, or what the model returns if that is the loss.
        effective_batch_size: samples per optimizer step; every config is compared at this number.
        unit: "samples" or "tokens" (then `sequence_length` is needed), what throughput counts.
        reduction: "mean" (over `count`) or "sum".
        count: batch -> number the mean runs over; default: shifted valid labels for causal LMs, valid labels where
            labels are per token, else samples.
        optimizer: parameter groups -> an optimizer to use instead of the knob's; the loop sets its learning rate.
        keeps: formats ("float32", ...) of trained and of frozen weights that must not change, which narrows the search;
            None: they may.
        varying: whether samples have many shapes, as texts padded to the longest of a batch.
        source: how models/ makes it again; written to result.yaml.
    """

    model: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    effective_batch_size: int = 32
    unit: str = "samples"
    sequence_length: int | None = None
    task: str = "custom"
    name: str = "custom"
    reduction: str = "mean"
    count: Callable[[Any], int] | None = None
    optimizer: Callable[[Any], Any] | None = None
    keeps: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    varying: bool = False
    traits: Traits | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, factory in ("model", self.model), ("batch", self.batch):
            if not callable(factory):
                message = f"Workload.{part} must be a function, not {type(factory).__name__}."
                raise InputError(message, f"Write {part}=lambda ...: ...")
        for part, function in ("loss", self.loss), ("count", self.count), ("optimizer", self.optimizer):
            if function is not None and not callable(function):
                message = f"Workload.{part} must be a function, not {type(function).__name__}."
                raise InputError(message, "Leave it out for the default.")
        size = self.effective_batch_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"the effective batch size must be a positive whole number, not {size!r}.")
        if size > MOST_SAMPLES:
            raise InputError(f"the effective batch size must be at most {MOST_SAMPLES:,}, not {shown(size)}.")
        if self.unit not in ("samples", "tokens"):
            raise InputError(f"unit must be 'samples' or 'tokens', not {self.unit!r}.")
        if self.unit == "tokens" and not self.sequence_length:
            raise InputError("unit='tokens' needs sequence_length.", "Give the number of tokens of one sample.")
        if self.task not in TASKS:
            raise InputError(f"task must be one of {', '.join(TASKS)}, not {self.task!r}.")
        if self.reduction not in ("mean", "sum"):
            raise InputError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}.")

    def summary(self) -> dict[str, Any]:
        """The `workload:` block of result.yaml."""
        return {name: getattr(self, name) for name in ("task", "sequence_length", "effective_batch_size")}


@dataclass(frozen=True)
class Hyperparameters:
    """Learning rate, its schedule, and what keeps training stable. Weight decay applies to matrices only."""

    lr: float = 1e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.lr) or self.lr <= 0:
            raise InputError(f"the learning rate must be positive, not {self.lr!r}.", "For example lr=1e-4.")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}.")
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            raise InputError(f"weight_decay must be a number of at least 0, not {self.weight_decay!r}.")
        if not isinstance(self.warmup_steps, int) or isinstance(self.warmup_steps, bool) or self.warmup_steps < 0:
            raise InputError(f"warmup_steps must be a whole number of at least 0, not {self.warmup_steps!r}.")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed must be a whole number of at most 63 bits, not {self.seed!r}.", "For example 0.")
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise InputError(f"max_grad_norm must be positive, not {self.max_grad_norm!r}.", "Leave it out for none.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
