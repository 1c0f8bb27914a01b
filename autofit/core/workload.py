"""Workload: what to train, apart from how; and the hyperparameters, which autofit never changes.

A Workload is three factories and the batch that defines the learning. Probe processes call them, so
they must survive cloudpickle; nothing here imports torch.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError, is_whole, require
from autofit.core.task import REFERENCE as REFERENCE
from autofit.core.task import Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.custom import CUSTOM

MOST_SAMPLES = 2**20  # of an effective batch, whose divisors are micro-batches
MOST_TOKENS = 2**31  # of a sample
SCHEDULES = ("constant", "cosine", "linear")
TRAINED = "model"  # the name of the trained one beside frozen models
# Which tokens: of chats the assistant's turns and of prompts the completions, or all.
LEARNT = ("assistant", "all")


def reduction_of(task: Task, config: object) -> str:
    """Whether the loss of a transformers model is a "mean" or a "sum"; CTC's config says it."""
    if task.labels == "transcript":
        return str(getattr(config, "ctc_loss_reduction", "mean"))
    return "mean"


EACH = "*"  # in the path of a count: every item of a list that holds one for each sample


class Rows(dict[Any, Any]):
    """A batch of one sample a row, even where positions start again within a row."""


@dataclass(frozen=True)
class Count:
    """What a mean loss runs over, as something that can be counted in any batch (by `data.counts`).

    Args:
        kind: "samples"; "sum" of a loss that is no mean, but a sum over samples; "unequal", the
            entries of a tensor that differ from `value`; "elements", all entries; "total", the sum
            of the entries.
        path: the keys and indices that lead to the tensor in a batch; EACH stands for all items of
            a list.
        columns: "all", or of every row those of the "next" tokens ([:, 1:]) or of "earlier" ones
            ([:, :-1]).
        mask: the path of a mask that must not be zero there, too.
    """

    kind: str = "samples"
    path: tuple[Any, ...] = ()
    value: int = -100
    columns: str = "all"
    mask: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        if self.kind == "samples":
            return "samples"
        if self.kind == "sum":
            return "a sum over samples"

        tensor = self._named(self.path)
        if self.kind == "elements":
            return f"elements of {tensor}"
        if self.kind == "total":
            return f"the sum of {tensor}"

        unequal = f"{tensor} != {self.value}"
        if self.mask is None:
            return unequal
        return f"{unequal} where {self._named(self.mask)} != 0"

    def _named(self, path: tuple[Any, ...]) -> str:
        keys = "".join("[i]" if key == EACH else f"[{key!r}]" for key in path)
        window = {"all": "", "next": "[:, 1:]", "earlier": "[:, :-1]"}[self.columns]
        return f"batch{keys}{window}"


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
    adapter_parameters: int = 0  # that LoRA on all linear layers trains for each rank
    adapters: bool = False  # whether it has some already, of its user's or of an earlier training
    quantized: bool = False  # whether its linear layers came quantised, and so frozen
    experts: str | None = None  # in the names of all experts' weights: "experts"; None: no experts
    # Whether it is a transformers model with cross-entropy over a linear head: `loss` need not hold
    # all logits.
    head: bool = False
    heads: int = 0  # divides all numbers of attention's heads, of queries and keys; 0: not known
    plan: bool = False  # whether transformers says how to split its layers over devices
    splits: bool = True  # whether the loss of a batch is the weighted mean of its slices' losses
    count: Count | None = None  # what that mean runs over, by gradients; None: as the task says
    rivals: tuple[Count, ...] = ()  # other counts that agree with `count` on all batches so far
    notes: tuple[str, ...] = ()
    # Equal for workloads of the same memory and time; None where user code cannot be compared.
    fingerprint: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Workload:
    """A model, its batches, its loss, and the effective batch that defines the learning.

    Args:
        model: () -> nn.Module; called with parameters on the meta device, so it need not be cheap
            in memory.
        batch: n -> a batch of n samples (dim 0 of every tensor) of the largest shape the data can
            produce.
        loss: (model, batch) -> scalar, or (sum, number of its terms); default
            `model(**batch).loss`, or what the model returns if that is the loss. With `frozen`
            models it gets a mapping in place of the model: "model", and each of those.
        effective_batch_size: samples per optimizer step; every config is compared at this number.
        unit: "samples" or "tokens" (then `sequence_length` is needed), what throughput counts.
        reduction: "mean" (over `count`) or "sum".
        count: batch -> number the mean runs over; default: what gradients of a few samples show,
            and for transformers' own losses what the task says.
        split: (batch, size) -> a list of micro-batches of `size` samples, the last one maybe
            shorter; needed where the samples are neither along dim 0 nor in a layout that is known
            (data/layouts.py).
        optimizer: parameter groups -> an optimizer to use instead of the knob's; the loop sets its
            learning rate.
        frozen: further models that the loss asks, which are not trained: names -> () -> nn.Module,
            or None for a copy of the model as it is before training.
        precomputes: whether batches hold, or can be given, what a copy of the model says of each
            sample before training (a tensor "reference").
        keeps: formats ("float32", ...) of trained and of frozen weights that must not change, which
            narrows the search; None: they may.
        varying: whether samples have many shapes, as texts padded to the longest of a batch.
        packing: whether its texts are put one after the other and cut, or padded; None: no data is
            known.
        padding: the share of padded batches that is padding.
        document_tokens: the length of packed samples in the mean, where they do not see one
            another; None: they do.
        data_tokens: that its data hold, each counted once; None: no data is known.
        data, form: the file that it was searched with, and the fields of its rows
            ("prompt+completion"); None: no file.
        source: how models/ makes it again; written to result.yaml.
        tool: the tool that is to run a config; None: no other than autofit.
        rules: further reasons against configs, by name: of that tool.
        notes: sentences about it that a person should read.
    """

    model: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    effective_batch_size: int = 32
    unit: str = "samples"
    sequence_length: int | None = None
    task: str = CUSTOM.name
    name: str = "custom"
    reduction: str = "mean"
    count: Callable[[Any], float] | None = None
    split: Callable[[Any, int], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    frozen: Mapping[str, Callable[[], Any] | None] = field(default_factory=dict)
    precomputes: bool = False
    keeps: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    varying: bool = False
    packing: bool | None = None
    padding: float = 0.0
    document_tokens: int | None = None
    data_tokens: int | None = None
    data: str | None = None
    form: str | None = None
    traits: Traits | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    tool: str | None = None
    rules: Mapping[str, Callable[[Config], str | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in ("model", "batch"):
            function = getattr(self, part)
            if not callable(function):
                message = f"Workload.{part} must be a function, not {type(function).__name__}."
                raise InputError(message, f"Write {part}=lambda ...: ...")
        for part in ("loss", "count", "split", "optimizer"):
            function = getattr(self, part)
            if function is not None and not callable(function):
                message = f"Workload.{part} must be a function, not {type(function).__name__}."
                raise InputError(message, "Leave it out for the default.")

        self._check_frozen()
        check_sizes(self.sequence_length, self.effective_batch_size)
        require(self.unit in ("samples", "tokens"), "unit must be 'samples' or 'tokens'", self.unit)
        if self.unit == "tokens" and self.sequence_length is None:
            message = "unit='tokens' needs sequence_length."
            raise InputError(message, "Give the number of tokens of one sample.")

        require(self.task in (*TASKS,), f"task must be one of {', '.join(TASKS)}", self.task)
        is_reduction = self.reduction in ("mean", "sum")
        require(is_reduction, "reduction must be 'mean' or 'sum'", self.reduction)
        require(isinstance(self.varying, bool), "varying must be True or False", self.varying)
        require(isinstance(self.name, str), "Workload.name must be text", self.name)
        for part, kind in _OURS.items():
            value = getattr(self, part)
            require(isinstance(value, kind), f"Workload.{part} is for autofit to give", value)

    def _check_frozen(self) -> None:
        """Raise an InputError for frozen models that the loss cannot be given."""
        rule = "Workload.frozen must be a mapping of names to functions"
        require(isinstance(self.frozen, Mapping), rule, self.frozen, "Leave it out for none.")

        for name, factory in self.frozen.items():
            fine = isinstance(name, str) and name != TRAINED
            require(fine, "a frozen model must have a name of its own", name)
            fine = factory is None or callable(factory)
            require(
                fine, f"the frozen model {name} must be a function, or None for a copy", factory
            )

        if self.frozen and self.loss is None:
            names = " and ".join(self.frozen)
            message = (
                f"the models of Workload.frozen ({names}) are asked by a loss, and none is given."
            )
            raise InputError(message, "Give loss=: a function of (models, batch).")

    def summary(self) -> dict[str, Any]:
        """What figures depend on."""
        summary: dict[str, Any] = {
            "task": self.task,
            "sequence_length": self.sequence_length,
            "effective_batch_size": self.effective_batch_size,
        }
        if self.document_tokens:
            summary["document_tokens"] = self.document_tokens
        own_loss = getattr(self.loss, "tool", None)
        if own_loss is not None:
            summary["own_loss"] = own_loss
        return summary

    def description(self) -> dict[str, Any]:
        """The `workload:` block of result.yaml."""
        described = self.summary()
        if self.packing is not None:
            described["packing"] = self.packing
            described["padding"] = round(self.padding, 4)
        if self.data is not None:
            described["data"] = self.data
            described["data_tokens"] = self.data_tokens
            described["form"] = self.form
        if self.tool is not None:
            described["tool"] = self.tool
        return described


# The types of fields that autofit gives, not its user.
_OURS = {
    "precomputes": bool,
    "packing": bool | None,
    "padding": float,
    "document_tokens": int | None,
    "data_tokens": int | None,
    "data": str | None,
    "form": str | None,
    "keeps": tuple | None,
    "traits": Traits | None,
    "source": Mapping,
    "tool": str | None,
    "rules": Mapping,
    "notes": tuple,
}


def check_sizes(length: object, batch: Any) -> None:
    """Raise an InputError for an impossible length (None: none) or effective batch size."""
    name = "the effective batch size"
    require(is_whole(batch, 1), f"{name} must be a positive whole number", batch)
    require(batch <= MOST_SAMPLES, f"{name} must be at most {MOST_SAMPLES:,}", batch)

    fine = length is None or (is_whole(length, 1) and length <= MOST_TOKENS)
    rule = f"the sequence length must be from 1 to {MOST_TOKENS:,}"
    require(fine, rule, length, "For example 2048.")


@dataclass(frozen=True)
class Hyperparameters:
    """Learning rate, its schedule, and what keeps training stable.

    Weight decay applies to matrices only.
    """

    lr: float = 1e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        lr = self.lr
        is_rate = _is_number(lr) and lr > 0
        require(is_rate, "the learning rate must be positive", lr, "For example lr=1e-4.")

        rule = f"schedule must be one of {', '.join(SCHEDULES)}"
        require(self.schedule in SCHEDULES, rule, self.schedule)

        decay = self.weight_decay
        is_decay = _is_number(decay) and decay >= 0
        require(is_decay, "weight_decay must be a number of at least 0", decay)

        steps = self.warmup_steps
        require(is_whole(steps, 0), "warmup_steps must be a whole number of at least 0", steps)
        check_seed(self.seed)

        norm = self.max_grad_norm
        is_norm = norm is None or (_is_number(norm) and norm > 0)
        require(is_norm, "max_grad_norm must be positive", norm, "Leave it out for none.")


def check_seed(seed: object) -> None:
    """Raise an InputError for what cannot be the seed of every random draw."""
    fine = is_whole(seed, -(2**63)) and seed < 2**63
    rule = "seed must be a whole number of at most 63 bits"
    require(fine, rule, seed, "For example 0.")


def check_learn(learn: object) -> None:
    """Raise an InputError for what does not say which tokens are learnt."""
    require(learn in LEARNT, f"learn must be one of {', '.join(LEARNT)}", learn)


def length_of_training(epochs: int | None, steps: int | None) -> int:
    """The number of epochs or steps, whichever is given; one epoch where neither is.

    Raises InputError where both are, and for what is no whole number from 1.
    """
    if epochs is not None and steps is not None:
        raise InputError("epochs and steps both say how long to train.", "Give one of them.")

    length = 1
    if steps is not None:
        length = steps
    elif epochs is not None:
        length = epochs
    require(is_whole(length, 1), "the length of training must be a positive whole number", length)
    return length


def check_counts(**counts: object) -> None:
    """Raise InputError unless each is a whole number from 1."""
    for name, count in counts.items():
        rule = f"{name} must be a whole number from 1"
        require(is_whole(count, 1), rule, count, f"For example {name}=2.")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
