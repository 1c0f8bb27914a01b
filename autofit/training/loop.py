"""The training loop: optimizer steps in a row, each reported, none lost when memory runs out."""

import enum
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autofit.core.errors import DivergedError, InputError, OutOfMemoryError, describe_error
from autofit.core.plain import Loss
from autofit.core.workload import Hyperparameters
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.setup.state import set_modes
from autofit.training.count_guard import CountGuard
from autofit.training.evaluation import Evaluation
from autofit.training.inspect import Prover
from autofit.training.local_batch import LocalBatch, local_batch
from autofit.training.memory_attribution import oom_snapshot
from autofit.training.memory_watch import MemoryWatch, StepMemory
from autofit.training.oom_recovery import Recovery
from autofit.training.step import accumulate, update

Listener = Callable[[str], None]
SEARCH_AGAIN = (
    "Search again within less memory (--gpu-mem, --mem), or for several devices "
    "(docs/out-of-memory.md)."
)
_COMPARED_STEPS = 10  # before and after a fallback, to report what it costs


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as callbacks get it.

    `step` counts from 1: it is the number of steps that are done. `samples` and `tokens` (labels
    that count, where the unit is tokens) are the batch's. `gradient_norm` is the global norm before
    clipping, where gradients are clipped. `skipped` says why the step changed no weight: "overflow"
    (of gradients, seen by the loss scaler) or "no label" (none in the batch counts). `seconds`
    excludes the wait for data, which is `data_seconds`. `memory` is what is held after the step.
    `evaluations` are those before this step, also of a run that is resumed, for callbacks that end
    training: `if report.step - min(report.evaluations).step > 500: return STOP`.
    """

    step: int
    loss: Loss
    lr: float
    samples: int
    tokens: int | None = None
    gradient_norm: Loss | None = None
    skipped: str | None = None
    seconds: float = field(default=0.0, compare=False)
    data_seconds: float = field(default=0.0, compare=False)
    memory: StepMemory = field(default=StepMemory(), compare=False)
    evaluations: tuple[Evaluation, ...] = field(default=(), compare=False)


class Stop(enum.Enum):
    """What a callback returns to end training; it stays the same object in every process."""

    STOP = "stop"


STOP = Stop.STOP
Callback = Callable[[StepReport], object]  # returns STOP where training is to end after this step


class ModelCallback:
    """A callback that asks the model itself between steps: a subclass says what, and when.

    `ask` is called on every rank, before the first step and after each. The random numbers that it
    draws are not missed by the training.
    """

    def __call__(self, report: StepReport) -> None:
        """A report needs no answer."""

    def ask(self, setup: Setup, step: int) -> None:
        """Ask the model of a setup, after so many steps."""
        raise NotImplementedError


def learning_rate_factor(hyperparameters: Hyperparameters, total_steps: int, step: int) -> float:
    """The factor on the learning rate at a step (0-based) of those that were not skipped.

    It warms up linearly, then follows the schedule down to 0. It is a function of the step alone,
    so a resumed run needs no other state.
    """
    warmup = hyperparameters.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)

    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if hyperparameters.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if hyperparameters.schedule == "linear":
        return 1 - progress
    return 1.0


def train(
    setup: Setup,
    batches: Iterable[Any],
    *,
    steps: int,
    first_step: int = 0,
    callbacks: Iterable[Callback] = (),
    listener: Listener = lambda _: None,
    prover: Prover | None = None,
) -> list[StepReport]:
    """Run optimizer steps `first_step` to `steps` over `batches`, and report each.

    Training ends early after a step of which a callback returns STOP. Steps that the loss scaler
    skips hold the schedule back. A step that runs out of memory is rolled back and retried with a
    config that needs less and learns the same; `listener` gets a sentence about it and its cost.

    Args:
        prover: finds out whether a loss may be split; None: one for copies of the model that the
            workload's factory makes.

    Raises:
        InputError: the batches end early.
        DivergedError: the loss is not finite; weights and running statistics are those before the
            step.
        OutOfMemoryError: no fallback is left, or memory ran out while weights were being updated.
    """
    stepper = Stepper(setup, listener, prover or Prover(setup.workload, setup.hardware))
    reports = []
    iterator = iter(batches)
    for step in range(first_step, steps):
        start = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            raise InputError(
                f"the data ended after {step} of {steps} steps.", "Give fewer steps, or more data."
            )

        updates = step - setup.progress.skipped_updates
        lr = setup.hyperparameters.lr * learning_rate_factor(setup.hyperparameters, steps, updates)
        report = stepper.run(batch, step=step, lr=lr, start=start)
        reports.append(report)

        answers = [callback(report) for callback in callbacks]
        if any(answer is STOP for answer in answers):
            break
    return reports


class Stepper:
    """Runs the steps of one setup and retries those that run out of memory."""

    def __init__(self, setup: Setup, listener: Listener, prover: Prover) -> None:
        self._setup = setup
        self._notify = listener
        self._recovery = Recovery(setup, lambda: prover.on_host().traits().splits)
        self._guard = CountGuard(setup, prover, listener)
        self._watch = MemoryWatch(setup.device, listener)

        self._step_seconds: list[float] = []  # of the steps since the config last changed
        self._seconds_before: float | None = None  # the median step before that

    def run(
        self,
        batch: Any,
        *,
        step: int,
        lr: float | None = None,
        start: float | None = None,
    ) -> StepReport:
        """One optimizer step, counted from 0.

        Args:
            lr: the learning rate; None: those that the optimizer's groups have.
            start: when the wait for the batch began; None: now.
        """
        setup = self._setup
        progress = setup.progress
        begun = time.perf_counter()
        if start is None:
            start = begun
        if not setup.model.training:  # somebody evaluated it, and left it so
            set_modes(setup.modes)

        part = local_batch(setup, batch)
        self._guard.check(part)
        if lr is not None:
            for group in setup.optimizer.param_groups:
                group["lr"] = lr * (group.get("lr_ratio") or 1.0)

        self._recovery.snapshot()
        tried = self._try(part, step)
        while tried is None:
            self._fall_back(step)
            tried = self._try(part, step)
        loss, is_updated = tried

        skipped = None
        if not is_updated and setup.scaler is not None and progress.terms:
            skipped = "overflow"
            progress.skipped_updates += 1
        elif not is_updated:
            skipped = "no label"

        progress.is_whole = True
        seconds = time.perf_counter() - begun
        self._note_cost(seconds)
        tokens = None
        if setup.workload.unit == "tokens":
            tokens = int(progress.terms)
        norm = None
        # without a label, it is that of the step before
        if progress.gradient_norm is not None and skipped != "no label":
            norm = float(progress.gradient_norm)
        return StepReport(
            step=step + 1,
            loss=loss,
            lr=float(setup.optimizer.param_groups[0]["lr"] if lr is None else lr),
            samples=part.samples,
            tokens=tokens,
            gradient_norm=norm,
            skipped=skipped,
            seconds=seconds,
            data_seconds=begun - start,
            memory=self._watch.after(step + 1),
        )

    def _try(self, batch: LocalBatch, step: int) -> tuple[float, bool] | None:
        """One optimizer step: its loss, and whether it updated weights; None when memory ran
        out."""
        setup = self._setup
        setup.progress.is_whole = False
        try:
            loss = float(accumulate(setup, batch))
            if not math.isfinite(loss):
                # also the running statistics, which the forward has spoilt
                self._recovery.roll_back()
                raise DivergedError(loss, step + 1)

            return loss, update(setup)
        except Exception as error:
            if not is_out_of_memory(error):
                self._undo(error)
                raise

            snapshot = oom_snapshot(setup, error)  # while the error's frames hold what they held
            if snapshot.asked_bytes is not None:
                self._notify(snapshot.words)
            return None

    def _undo(self, error: Exception) -> None:
        """Go back to before a step that failed, where that is possible."""
        try:
            self._setup.progress.is_whole = self._recovery.roll_back()
        except Exception as another:  # of a device that is gone
            error.add_note(f"The step could not be undone: {describe_error(another)}.")

    def _fall_back(self, step: int) -> None:
        """Roll the step back and change the config.

        The handler has returned, so the step's tensors are freed. Raises OutOfMemoryError where
        the step cannot be done again.
        """
        setup = self._setup
        ranks = setup.ranks
        failure = f"memory ran out in the {setup.progress.phase} of step {step + 1}"
        change = None
        if ranks.are_several:  # the others wait for this one in the middle of the step
            failure += f" on rank {ranks.rank} of {ranks.layout.world}"
            if self._recovery.reduce() is not None:
                raise OutOfMemoryError(f"{failure}.", torn=True)
        elif self._recovery.roll_back():
            change = self._recovery.reduce()
        else:
            self._recovery.reduce()
            raise OutOfMemoryError(f"{failure}, which left weights half updated.", torn=True)

        if change is None:
            raise OutOfMemoryError(
                f"{failure}, and nothing is left that would need less and learn the same "
                f"(micro-batch {setup.micro_batch_size}).",
                SEARCH_AGAIN,
            )

        self._notify(f"{failure}: the step is done again, from here on with {change}.")
        if self._step_seconds:
            self._seconds_before = median(self._step_seconds[-_COMPARED_STEPS:])
        self._step_seconds = []

    def _note_cost(self, seconds: float) -> None:
        """Note the time of a step, and say what a fallback costs once enough steps show it."""
        self._step_seconds.append(seconds)
        del self._step_seconds[: -2 * _COMPARED_STEPS]
        if self._seconds_before is None or len(self._step_seconds) != _COMPARED_STEPS:
            return

        now = median(self._step_seconds[1:])  # the first one includes the failed attempt
        cost = now / self._seconds_before - 1
        direction = "less"
        if cost > 0:
            direction = "more"
        self._notify(
            f"a step takes {now:.3g} s since then, {abs(cost):.0%} {direction} than before."
        )
        self._seconds_before = None
