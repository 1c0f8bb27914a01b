"""The loop: optimizer steps one after the other, each reported, none lost when memory runs out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from autofit.core.errors import DivergedError, InputError, OutOfMemoryError
from autofit.data.batch import loss_count, sample_count
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.training.inspect import loss_splits
from autofit.training.oom_recovery import Recovery
from autofit.training.schedule import learning_rate_factor
from autofit.training.step import accumulate, update

Listener = Callable[[str], None]
_COMPARED_STEPS = 10  # before and after going down the ladder, for telling what it costs


@dataclass(frozen=True)
class StepReport:
    """What a callback is told after every optimizer step.

    `step` counts from 0; `samples` and `tokens` (labels that count, where the unit is tokens) are those of the batch;
    `seconds` is the step's time, of which waiting for data is no part: that is `data_seconds`. `gradient_norm` is the
    global norm before clipping, where gradients are clipped.
    """

    step: int
    loss: float
    lr: float
    samples: int
    tokens: int | None = None
    gradient_norm: float | None = None
    seconds: float = field(default=0.0, compare=False)
    data_seconds: float = field(default=0.0, compare=False)


Callback = Callable[[StepReport], None]


def train(
    setup: Setup,
    batches: Iterable[Any],
    *,
    steps: int,
    first_step: int = 0,
    callbacks: Iterable[Callback] = (),
    listener: Listener = lambda _: None,
) -> list[StepReport]:
    """Run optimizer steps `first_step` to `steps` over `batches` (long enough an iterable) and report each.

    A step that runs out of memory is taken back and done again with a config that needs less and learns the same;
    `listener` is told what was done and what it costs.

    Raises:
        InputError: the batches end early.
        DivergedError: the loss is no longer finite; weights and running statistics are those before the step.
        OutOfMemoryError: there is nothing left to save, or memory ran out while weights were being updated.
    """
    run = _Run(setup, listener)
    factor = learning_rate_factor(setup.hyperparameters, steps)
    setup.model.train()
    reports: list[StepReport] = []
    iterator = iter(batches)
    for step in range(first_step, steps):
        start = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            raise InputError(f"the data ended after {step} of {steps} steps.", "Give fewer steps, or more data.")
        report = run.step(batch, step=step, lr=setup.hyperparameters.lr * factor(step), start=start)
        reports.append(report)
        for callback in callbacks:
            callback(report)
    return reports


class _Run:
    """Steps of one setup, and what has to be known when one fails."""

    def __init__(self, setup: Setup, listener: Listener) -> None:
        self._setup = setup
        self._tell = listener
        self._recovery = Recovery(setup, self._splits)
        self._seconds: list[float] = []  # of the steps since the config was last changed
        self._former: float | None = None  # what a step took before

    def step(self, batch: Any, *, step: int, lr: float, start: float) -> StepReport:
        setup = self._setup
        assert setup.optimizer is not None, "build() sets the optimizer"
        begun = time.perf_counter()
        for group in setup.optimizer.param_groups:
            group["lr"] = lr
        self._recovery.remember()
        loss = self._try(batch, step)
        while loss is None:
            self._recover(step)
            loss = self._try(batch, step)
        norm = setup.gradient_norm
        seconds = time.perf_counter() - begun
        self._notice(seconds)
        return StepReport(
            step=step,
            loss=loss,
            lr=lr,
            samples=sample_count(batch),
            tokens=loss_count(setup.workload, batch) if setup.workload.unit == "tokens" else None,
            gradient_norm=float(norm) if norm is not None else None,
            seconds=seconds,
            data_seconds=begun - start,
        )

    def _try(self, batch: Any, step: int) -> float | None:
        """One optimizer step; its loss, or None when memory ran out."""
        setup = self._setup
        assert setup.optimizer is not None, "build() sets the optimizer"
        try:
            loss = float(accumulate(setup, batch))
            if not math.isfinite(loss):
                self._recovery.take_back()  # running statistics too, which the forward has spoilt
                raise DivergedError(loss, step)
            update(setup)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return loss

    def _recover(self, step: int) -> None:
        """Take the step back and go down the ladder. The handler has been left, so the step's tensors are gone."""
        setup, phase = self._setup, self._setup.phase
        place = f"memory ran out in the {phase} of step {step}"
        if not self._recovery.take_back():
            self._recovery.step_down()
            raise OutOfMemoryError(f"{place}, which left weights half updated.", torn=True)
        changed = self._recovery.step_down()
        if changed is None:
            message = f"{place}, and nothing is left that would need less and learn the same"
            raise OutOfMemoryError(f"{message} (micro-batch {setup.micro_batch_size}).")
        self._tell(f"{place}: the step is done again, from here on with {changed}.")
        if self._seconds:
            self._former = median(self._seconds[-_COMPARED_STEPS:])
        self._seconds = []

    def _notice(self, seconds: float) -> None:
        self._seconds.append(seconds)
        del self._seconds[: -2 * _COMPARED_STEPS]
        if self._former is not None and len(self._seconds) == _COMPARED_STEPS:
            now = median(self._seconds[1:])  # the first one holds what failed
            cost = now / self._former - 1
            self._tell(
                f"a step takes {now:.3g} s since then, {abs(cost):.0%} {'more' if cost > 0 else 'less'} than before."
            )
            self._former = None

    def _splits(self) -> bool:
        """Whether the loss may be split, tried on what needs least memory; transformers' own losses may."""
        workload = self._setup.workload
        if workload.loss is None and workload.task != "custom":
            return True
        with torch.no_grad():
            return loss_splits(self._setup, workload.batch(min(2, workload.effective_batch_size)))[0]
