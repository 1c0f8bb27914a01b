"""`autofit.prepare`: the build and the training step that probes ran, for a loop of one's own."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.api.search import log_event
from autofit.core.config import Config
from autofit.core.errors import InputError, multiple_losses_error, require
from autofit.core.events import Listener, Note
from autofit.core.layout import Layout, fitted_to
from autofit.core.learning_rates import default_learning_rate, learning_rate_note
from autofit.core.place import given_place
from autofit.core.result import knobs_of
from autofit.core.workload import Hyperparameters
from autofit.distributed.group import joined
from autofit.hardware.device import usual_kind
from autofit.setup import Setup
from autofit.training import checkpoint
from autofit.training.evaluation import evaluate
from autofit.training.loop import Stepper, StepReport
from autofit.training.prepared import Prepared, on_device
from autofit.training.workload import training_workload

# Builds the model for what the batches of a loader are like; what it opens goes to the stack.
_Build = Callable[[Any, contextlib.ExitStack], tuple[Setup, Stepper]]


class TrainingStep:
    """A model built as a config says, and its optimizer step, ready to call.

    `step(batch)` makes one optimizer step on one effective batch, which it cuts into micro-batches,
    and returns its loss. The model is built at the first step, or at once where `prepare` got a
    loader. Use it in a `with`, or call `close` at the end: the model comes back without hooks.

    Where several devices train, each process calls it with the whole batch, and trains on its part.
    """

    def __init__(self, build: _Build, loader: Any) -> None:
        self._build = build
        self._stack = contextlib.ExitStack()
        self._setup: Setup | None = None
        self._stepper: Stepper | None = None
        self._is_closed = False
        self._steps = 0
        self.report: StepReport | None = None  # of the last step
        if loader is not None:
            self._setup, self._stepper = build(loader, self._stack)

    @torch.inference_mode(mode=False)  # as `fit` has it
    @torch.enable_grad()
    def __call__(self, batch: Any) -> float:
        """Make one optimizer step; returns the loss of the batch before it.

        Learning rates are those in `optimizer.param_groups`, which a scheduler may set. A step that
        runs out of memory is made again with smaller micro-batches.

        Raises:
            InputError: the batch is not as the first one was, or the loss is not finite.
            OutOfMemoryError: no smaller micro-batch is left, or weights were half updated.
        """
        if self._is_closed:
            raise InputError("this training step was closed.", "Prepare the model again.")
        if self._stepper is None:
            self._setup, self._stepper = self._build([batch], self._stack)

        self.report = self._stepper.run(batch, step=self._steps)
        self._steps += 1
        return self.report.loss

    @property
    def model(self) -> nn.Module:
        """The model as it trains: with adapters, hooks, and weights where the config has them."""
        return self._built.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, for a scheduler of learning rates; `step(batch)` calls it."""
        return self._built.optimizer

    @property
    def config(self) -> Config:
        """The config that it trains with by now."""
        return self._built.config

    def evaluate(self, batches: Any) -> float:
        """The mean loss over batches, in eval mode, without gradients."""
        return evaluate(self._built, batches)

    def state_dict(self) -> dict[str, Any]:
        """All that training changes: weights, buffers, optimizer, loss scaler and random numbers.

        It shares no memory with the model. Where several devices train, it is this one's own.
        """
        return {"steps": self._steps, **checkpoint.state_of(self._built)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same model and config."""
        checkpoint.restore_state(self._built, state)
        self._steps = state["steps"]

    def close(self) -> None:
        """Give the model back without hooks and wrappers; trained weights and adapters stay."""
        self._is_closed = True
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _built(self) -> Setup:
        if self._setup is None:
            message = "the model is built at the first step, and there was none yet."
            raise InputError(message, "Give prepare() a loader, whose batches show what to build.")
        return self._setup


def prepare(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    loader: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any, int], Any] | None = None,
    count: Callable[[Any], float] | None = None,
    frozen: Mapping[str, Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    lr: float | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    seed: int = 0,
    device: str | None = None,
    listener: Listener = log_event,
) -> TrainingStep:
    """Build a model as a config says, for a training loop of one's own.

    It is the build and the step of `fit`, and of the probes that measured the config. Under
    torchrun or srun each process takes its place among those that were started.

    Args:
        model: any nn.Module, changed in place until the step is closed.
        config: an autofit.Config, a mapping of knobs, or the path of a result.yaml or config file.
        loader: whose first batches show what a batch holds, as `fit` reads them; default: the first
            batch that the step is called with.
        loss, split, count, frozen, optimizer: as in `fit`.
        lr: of the optimizer as it begins; default: as in `fit`.
        max_grad_norm: gradients are clipped to this global norm.
        device: "cuda" or "cpu"; default: the card where there is one.
        listener: called with notes; default: the logger `autofit`.

    Raises:
        InputError: an argument is wrong, or the config is for more devices than were started.
    """
    knobs = Config(knobs_of(config))
    knobs = Config({**knobs, **named_optimizer(optimizer)})
    rate = default_learning_rate(knobs) if lr is None else lr
    hyperparameters = Hyperparameters(rate, weight_decay, max_grad_norm=max_grad_norm, seed=seed)
    rule = "listener must be a function"
    require(callable(listener), rule, listener, "Leave it out for the logger autofit.")

    place = given_place()

    def say(text: str) -> None:
        if place is None or not place.rank:
            listener(Note(text))

    if lr is None:
        say(learning_rate_note(knobs))
    wanted = Layout.of(knobs).world
    if place is None and wanted > 1:
        message = f"the config is for {wanted} devices, and this process was started alone."
        raise InputError(message, f"Start it with torchrun --nproc-per-node {wanted} SCRIPT.")

    def build(batches: Any, stack: contextlib.ExitStack) -> tuple[Setup, Stepper]:
        workload = training_workload(
            model,
            batches,
            loss,
            optimizer=optimizer if callable(optimizer) else None,
            split=split,
            count=count,
            frozen=frozen,
        )
        if place and not torch.distributed.is_initialized():
            stack.enter_context(joined(place, device or usual_kind()))

        world = place.world if place else 1
        fitted = fitted_to(knobs, world, workload.effective_batch_size)
        with contextlib.ExitStack() as building:
            hardware = building.enter_context(on_device(workload, model, device, say))
            prepared = Prepared(workload, model, fitted, hardware, hyperparameters, say)
            building.callback(prepared.close)
            stack.push(building.pop_all())
        return prepared.setup, Stepper(prepared.setup, say, prepared.prover)

    return TrainingStep(build, loader)


def named_optimizer(optimizer: Any) -> dict[str, Any]:
    """The knob that the name of an optimizer fixes; nothing where there is none, or a function."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return {}

    kind = type(optimizer).__name__
    if isinstance(optimizer, list | tuple | dict) and len(optimizer) > 1:
        raise multiple_losses_error(f"optimizer is a {kind} of {len(optimizer)}")
    if not isinstance(optimizer, str):
        message = f"optimizer must be the name of one or a function that makes one, not a {kind}."
        raise InputError(message, "For example optimizer=lambda groups: torch.optim.NAdam(groups).")
    return {"optimizer": optimizer}
