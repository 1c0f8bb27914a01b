"""One training of a living model with a known config: built, resumed, run, evaluated, kept, and given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from autofit.core.errors import AutofitError, DivergedError, OutOfMemoryError, counted
from autofit.core.files import write_atomically
from autofit.core.hardware import Hardware
from autofit.core.strict_yaml import dump, load_mapping
from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware import segments
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.training import checkpoint, random_state
from autofit.training.build import build
from autofit.training.epochs import Passes
from autofit.training.evaluation import check_evaluation, evaluate
from autofit.training.given_back import given_back
from autofit.training.inspect import check_loss
from autofit.training.loop import Callback, Listener, StepReport, train
from autofit.training.metrics import Bar, MetricsFile, Recorder, TensorBoard
from autofit.training.oom_recovery import FALLBACK_KNOBS
from autofit.training.save_model import save_model
from autofit.training.workload import batches_of, length_of

_SLOW_LOADER, _WORTH_A_WORD = 0.1, 0.2  # share of the time, and seconds
METRICS, CUTS = "metrics.jsonl", "after-out-of-memory.yaml"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run is kept and how: a directory or None, a checkpoint every so many steps, the last few of them."""

    directory: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    keep_last: int = 2

    def cuts(self) -> dict[str, Any]:
        """How a run that is resumed cuts its batches since it ran out of memory; nothing, where it never did."""
        path = self.directory / CUTS if self.directory else None
        return load_mapping(path) if self.resume and path and path.exists() else {}

    def keep_cuts(self, config: Mapping[str, Any]) -> None:
        """Write down what `Recovery` may change, so that a run that is resumed does not have to find out again."""
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / CUTS, dump({knob: config[knob] for knob in FALLBACK_KNOBS}))

    def __post_init__(self) -> None:
        checkpoint.check_counts(checkpoint_every=self.checkpoint_every, keep_last=self.keep_last)


@dataclass(frozen=True)
class Session:
    """What is trained, how it learns, and who is told.

    `listener` gets sentences; `callbacks` the report of every step. `restart` is called where memory ran out in the
    middle of an update, to go on from the last checkpoint in a fresh process; without it that is done in this one.
    """

    workload: Workload
    model: nn.Module
    hyperparameters: Hyperparameters
    keeping: CheckpointPolicy
    callbacks: Sequence[Callback]
    listener: Listener
    progress: bool = False
    restart: Callable[[], NoReturn] | None = None

    def run(
        self, config: Mapping[str, Any], device: str | None, loader: Any, *, steps: int, eval_loader: Any = None
    ) -> tuple[list[StepReport], list[float]]:
        """Train the model itself, and give it back as it came, but trained; the reports and the evaluations.

        Raises:
            InputError: the config cannot be, or the loss does not go with it; AutofitError: see `train`.
        """
        torch.manual_seed(self.hyperparameters.seed)
        cuts = self.keeping.cuts()
        if cuts:
            self.listener(f"memory ran out in this run before, so it goes on with {_told(cuts)}.")
        self.model.zero_grad()  # of what was done with it before, which the first step would add its own to
        keeps = self.workload.keeps is not None
        with segments.as_in_probes(device, self.listener), given_back(self.model, formats=keeps):
            setup = self._built({**config, **cuts}, detect(device))
            try:
                if self.keeping.directory:
                    checkpoint.check_savable(setup)
                with random_state.kept(setup.device):
                    check_loss(setup)
                    if eval_loader is not None:
                        check_evaluation(setup, eval_loader)
                return _Training(self, setup, loader, eval_loader).to(steps)
            finally:
                setup.close()

    def _built(self, config: Mapping[str, Any], hardware: Hardware) -> Setup:
        """The setup, with all that is to be said of it said."""
        setup = build(self.workload, config, hardware, model=self.model, hyperparameters=self.hyperparameters)
        for note in (*hardware.notes, *setup.warnings):
            self.listener(note)
        return setup


class _Training:
    """A session from its build to its last step."""

    def __init__(self, session: Session, setup: Setup, loader: Any, eval_loader: Any) -> None:
        self._session, self._setup = session, setup
        self._keeping, self._tell = session.keeping, session.listener
        self._loader, self._eval_loader = loader, eval_loader
        self._passes = Passes(loader, session.hyperparameters.seed)
        self._per_pass = length_of(loader)
        self._history: list[StepReport] = []
        self._evaluations: dict[int, float] = {}  # by the step before them
        self._recorders: list[Recorder] = []
        self._config = setup.config

    def to(self, steps: int) -> tuple[list[StepReport], list[float]]:
        """Train up to that many steps in all, from wherever the run stands."""
        first = self._resumed() if self._keeping.resume and self._has_checkpoint() else 0
        if first > steps:
            self._tell(f"the run has done {counted(first, 'step')} already, more than the {steps} it was to go on to.")
        with ExitStack() as stack:
            for recorder in self._make_recorders(steps, first):
                stack.callback(recorder.close)
                self._recorders.append(recorder)
            while True:
                torn = self._attempt(first, steps)
                if torn is None:
                    break
                first = self._back_to_checkpoint(torn)
        self._say_if_data_was_slow()
        if self._keeping.directory:
            save_model(self._setup, self._keeping.directory / "model")
        return self._history, list(self._evaluations.values())

    def _make_recorders(self, steps: int, first: int) -> list[Recorder]:
        recorders: list[Recorder] = []
        directory = self._keeping.directory
        if directory:
            recorders.append(MetricsFile(directory / METRICS, first_step=first))
            if TensorBoard.installed():
                recorders.append(TensorBoard(directory / "tensorboard"))
        if self._session.progress:
            recorders.append(Bar(steps, first_step=first))
        return recorders

    def _attempt(self, first: int, steps: int) -> OutOfMemoryError | None:
        """Run to the end; the error when memory ran out in the middle of an update, which a checkpoint can mend."""

        def after(report: StepReport) -> None:
            self._after(report, steps)

        callbacks = (*self._session.callbacks, *self._recorders, after)
        try:
            train(self._setup, self._passes, steps=steps, first_step=first, callbacks=callbacks, listener=self._tell)
        except DivergedError as error:
            raise self._with_place(error) from None
        except OutOfMemoryError as error:
            if not error.torn:
                raise
            self._keeping.keep_cuts(self._setup.config)
            return error
        return None

    def _after(self, report: StepReport, steps: int) -> None:
        self._history.append(report)
        done = report.step + 1
        if self._setup.config != self._config:
            self._config = self._setup.config
            self._keeping.keep_cuts(self._config)
        if self._keeping.directory and (done % self._keeping.checkpoint_every == 0 or done == steps):
            self._save(done)
        if self._eval_loader is not None and (done == steps or (self._per_pass and done % self._per_pass == 0)):
            with random_state.kept(self._setup.device):  # a resumed run does not draw them again
                loss = evaluate(self._setup, batches_of(self._eval_loader))
            self._evaluations[report.step] = loss
            for recorder in self._recorders:
                recorder.evaluated(report.step, loss)

    def _save(self, next_step: int) -> None:
        assert self._keeping.directory, "checkpoints need a place"
        checkpoint.save(
            self._setup,
            self._keeping.directory,
            next_step,
            keep_last=self._keeping.keep_last,
            data_state=self._passes.state(),
        )

    def _has_checkpoint(self) -> bool:
        directory = self._keeping.directory
        return directory is not None and checkpoint.exists(directory)

    def _resumed(self) -> int:
        """The step to go on with, everything as it was after the one before; also in the middle of a pass."""
        assert self._keeping.directory, "checked by the callers"
        loaded = checkpoint.load(self._setup, self._keeping.directory)
        self._passes = Passes(self._loader, self._session.hyperparameters.seed)
        for note in loaded.notes:
            self._tell(note)
        self._passes.go_on(loaded.next_step, loaded.data_state, self._setup.device)
        return loaded.next_step

    def _back_to_checkpoint(self, torn: OutOfMemoryError) -> int:
        if self._session.restart and self._keeping.directory:
            self._tell(f"{torn.message[:-1]}: training goes on in a fresh process, from the last checkpoint.")
            self._session.restart()
        if not self._has_checkpoint():
            raise OutOfMemoryError(
                f"{torn.message[:-1]}, and there is no checkpoint to go back to.",
                "Load the weights again, and train with an output_dir and a smaller config.",
            )
        first = self._resumed()
        self._history = [report for report in self._history if report.step < first]
        self._evaluations = {step: loss for step, loss in self._evaluations.items() if step < first}
        for recorder in self._recorders:
            recorder.back_to(first)
        place = f"{torn.message[:-1]}: training goes on from the checkpoint after {counted(first, 'step')}"
        self._tell(f"{place}, with {_told(self._setup.config)}.")
        return first

    def _with_place(self, error: DivergedError) -> AutofitError:
        """The error with the batch that caused it, and with where the weights before it are kept."""
        place = f"{error.message[:-1]} ({self._passes.place})."
        if not self._keeping.directory:
            return DivergedError(error.loss, error.step, place)
        self._save(error.step)
        kept = f"{place[:-1]}; the state before it is kept in {self._keeping.directory}."
        return DivergedError(error.loss, error.step, kept)

    def _say_if_data_was_slow(self) -> None:
        waited = sum(report.data_seconds for report in self._history)
        total = waited + sum(report.seconds for report in self._history)
        if waited > _WORTH_A_WORD and waited / total > _SLOW_LOADER:
            self._tell(
                f"the loader is too slow for this device: {waited / total:.0%} of the time was spent waiting for data."
                " More num_workers, or data that is prepared before, would help."
            )


def _told(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {config[knob]}" for knob in FALLBACK_KNOBS)
