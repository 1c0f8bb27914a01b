"""Workload: what is to be trained, apart from how.

Three factories and the batch that defines the learning. They are called in probe processes, so they must survive
cloudpickle; nothing here imports torch, and a model or a batch is only ever named by its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.errors import InputError

SCHEDULES = ("constant", "cosine", "linear")
TASKS = ("causal-lm", "masked-lm", "sequence-classification", "image-classification", "custom")
_ENDINGS = {  # of the names of transformers' classes
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForImageClassification": "image-classification",
}
CLASSIFICATION_TASKS = ("sequence-classification", "image-classification")  # their heads are new: trained whole


def task_of(model: object) -> str | None:
    """The task of a model of transformers, by the name of its class; None for any other."""
    name = type(model).__name__
    return next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), None)


@dataclass(frozen=True)
class Traits:
    """What one look at the model's structure and loss told (made by `training.inspect`, in a probe process).

    `blocks` counts the repeated blocks that checkpointing and regional compilation work on; `attention` is whether
    there are linear layers inside attention modules, `sdpa` whether the forward calls PyTorch's fused attention.
    `splits` is whether the loss of a batch is the weighted mean of its slices' losses; `batch_norm` whether slices
    change the statistics of normalisation layers. `head` is whether the model is one of transformers whose loss is a
    cross-entropy over a linear output head, which `loss` can compute without holding all logits. `fingerprint` is the
    same for workloads that take the same memory and time; None where the user's code cannot be told apart.
    """

    parameters: int
    blocks: int
    linears: int
    attention: bool
    sdpa: bool
    batch_norm: bool
    dropout: bool
    head: bool = False
    splits: bool = True
    notes: tuple[str, ...] = ()
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
        optimizer: parameter groups -> an optimizer of one's own, instead of those of the knob; its learning rate is
            set by the loop.
        keeps: formats ("float32", ...) of trained and of frozen weights that are to come back as they came, which
            narrows what is searched; None: they may change.
        varying: whether samples come in many shapes, as texts do that are padded to the longest of a batch.
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
    source: Mapping[str, Any] = field(default_factory=dict)  # how models/ can make it again; written to result.yaml

    def __post_init__(self) -> None:
        for part in ("model", "batch"):
            if not callable(getattr(self, part)):
                given = type(getattr(self, part)).__name__
                raise InputError(f"Workload.{part} must be a function, not {given}.", f"Write {part}=lambda ...: ...")
        if not isinstance(self.effective_batch_size, int) or self.effective_batch_size < 1:
            raise InputError(
                f"the effective batch size must be a positive whole number, not {self.effective_batch_size!r}."
            )
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
        return {
            "task": self.task,
            "sequence_length": self.sequence_length,
            "effective_batch_size": self.effective_batch_size,
        }


@dataclass(frozen=True)
class Hyperparameters:
    """Learning rate, its course, and what keeps it stable. Weight decay falls on matrices only."""

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
        for name in ("weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise InputError(f"{name} must be a number of at least 0, not {value!r}.")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed must be a whole number of at most 63 bits, not {self.seed!r}.", "For example 0.")
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise InputError(f"max_grad_norm must be positive, not {self.max_grad_norm!r}.", "Leave it out for none.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
