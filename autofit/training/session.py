"""One training of the user's model with a known config: build, resume, run, evaluate, save, and restore."""

import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from autofit.core.errors import AutofitError, DivergedError, OutOfMemoryError, counted, sentence
from autofit.core.files import write_atomically
from autofit.core.interrupts import SIGNALS, Interrupts
from autofit.core.layout import largest_divisor, part_of
from autofit.core.strict_yaml import dump, load_mapping
from autofit.core.workload import Hyperparameters, Workload, check_counts
from autofit.distributed.group import devices_of_group
from autofit.hardware import segments
from autofit.hardware.device import detect
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup, requirements
from autofit.setup.adapters import new_token_rows
from autofit.training import checkpoint, json_state, random_state
from autofit.training.atomic_writes import clean_up
from autofit.training.build import build
from autofit.training.epochs import Epochs
from autofit.training.evaluation import check_evaluation, evaluate
from autofit.training.inspect import check_loss
from autofit.training.loop import SEARCH_AGAIN, Callback, Listener, StepReport, train
from autofit.training.metrics import Bar, MetricsFile, Recorder, TensorBoard
from autofit.training.oom_recovery import FALLBACK_KNOBS
from autofit.training.own_part import own_loader
from autofit.training.save_model import save_model
from autofit.training.user_model import restored
from autofit.training.workload import batches_of, length_of

_SLOW_LOADER_SHARE, _SLOW_LOADER_SECONDS = 0.1, 0.2  # of the time; and in all
METRICS_FILE, BATCH_SPLIT_FILE = "metrics.jsonl", "after-out-of-memory.yaml"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run is saved (None: nowhere), how often in steps, and how many of the last checkpoints are retained."""

    directory: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    keep_last: int = 2

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=self.checkpoint_every, keep_last=self.keep_last)

    def batch_split(self) -> dict[str, Any]:
        """The knobs that a resumed run changed when it ran out of memory; empty where it never did."""
        path = self.directory / BATCH_SPLIT_FILE if self.directory else None
        return load_mapping(path) if self.resume and path and path.exists() else {}

    def save_batch_split(self, config: Mapping[str, Any]) -> None:
        """Save what `Recovery` may change, so that a resumed run does not run out of memory again."""
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / BATCH_SPLIT_FILE, dump({knob: config[knob] for knob in FALLBACK_KNOBS}))


@dataclass(frozen=True)
class Session:
    """What is trained, how it learns, and who listens. `listener` gets sentences; `callbacks` the report of every step,
    on the first rank. `restart` is called where memory ran out in the middle of an update, to resume in a fresh
    process; without it this process goes back to the last checkpoint. `taken` gets the trained setup, whose model then
    need not come back as it was: the process ends."""

    workload: Workload
    model: nn.Module
    hyperparameters: Hyperparameters
    policy: CheckpointPolicy
    callbacks: Sequence[Callback]
    listener: Listener
    progress: bool = False
    restart: Callable[[], NoReturn] | None = None
    taken: Callable[[Setup], Any] | None = None

    def run(
        self, config: Mapping[str, Any], device: str | None, loader: Any, *, steps: int, eval_loader: Any = None
    ) -> tuple[list[StepReport], list[float]]:
        """Train the model in place and restore its modes; returns the reports and the evaluations."""
        torch.manual_seed(self.hyperparameters.seed)
        batch_split = self.policy.batch_split()
        self.model.zero_grad()  # earlier gradients would be added to those of the first step
        restore_dtypes = self.workload.keeps is not None
        restoring = restored(self.model, dtypes=restore_dtypes)
        with _shortage_told(), segments.as_in_probes(device, self.listener), restoring:
            hardware = detect(device).of_several(*devices_of_group())
            if batch_split:  # perhaps of another number of devices
                part = part_of(config, hardware.world, self.workload.effective_batch_size)
                micro = largest_divisor(
                    part, min(batch_split["micro_batch_size"], config.get("micro_batch_size") or part)
                )
                batch_split |= {"micro_batch_size": micro, "gradient_accumulation_steps": part // micro}
                self.listener(f"memory ran out in this run before, so it goes on with {_describe(batch_split)}.")
            config = {**config, **batch_split}
            setup = build(self.workload, config, hardware, model=self.model, hyperparameters=self.hyperparameters)
            for note in (*hardware.notes, *setup.warnings, *_untrained_rows(self.model)):
                self.listener(note)
            try:
                if self.policy.directory:
                    checkpoint.check_savable(setup)
                with random_state.preserved(setup.device):
                    check_loss(setup)
                    if eval_loader is not None:
                        check_evaluation(setup, eval_loader)
                answer = _Training(self, setup, loader, eval_loader).run(steps)
                if self.taken:
                    self.taken(setup)
                return answer
            finally:
                if not self.taken:
                    setup.close()


def _untrained_rows(model: nn.Module) -> list[str]:
    """A note on rows that were added to a token embedding which is frozen."""
    rows = new_token_rows(model)
    if not rows:
        return []
    note = f"the token embedding has {counted(rows, 'row')} more than the model it was loaded from"
    remedy = "wrap the model with peft and trainable_token_indices, beside lora_rank 0, or train all weights"
    return [f"{note}, and is frozen: they stay as they were made. To train them, {remedy}."]


@contextmanager
def _shortage_told() -> Iterator[None]:
    """Name memory that runs out beside the steps, which recover by themselves: where weights get to the device, in the
    first look at the loss, in callbacks."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out outside of a step: {sentence(error)}.", SEARCH_AGAIN) from error


class _Training:
    """A session from its build to its last step."""

    def __init__(self, session: Session, setup: Setup, loader: Any, eval_loader: Any) -> None:
        self._session, self._setup, self._ranks = session, setup, setup.ranks
        self._policy, self._notify = session.policy, session.listener
        self._directory = session.policy.directory
        self._loader = own_loader(loader, setup.ranks)
        self._eval_loader = None if eval_loader is None else own_loader(eval_loader, setup.ranks)
        self._epochs = Epochs(self._loader, session.hyperparameters.seed)
        self._epoch_length = length_of(loader)
        self._history: list[StepReport] = []
        self._evaluations: dict[int, float] = {}  # by the step before them
        self._recorders: list[Recorder] = []
        self._config = setup.config
        self._is_counted = False  # the position in the data, because a checkpoint cannot hold it
        self._interrupts = Interrupts(self._note_interrupt)
        self._agreed: int | None = None  # a signal that came to any of several ranks before a step's loss was known
        if self._directory and self._ranks.are_several:
            setup.added_up.append((self._signals, self._agree))

    def run(self, steps: int) -> tuple[list[StepReport], list[float]]:
        """Train up to that many steps in all, from wherever the run stands."""
        is_resumed = self._policy.resume and self._directory is not None and checkpoint.exists(self._directory)
        first = self._resume() if is_resumed else 0
        if first > steps:
            done = counted(first, "step")
            self._notify(f"the run has done {done} already, more than the {steps} it was to go on to.")
        with ExitStack() as stack:
            if self._directory and self._ranks.is_first:
                self._recorders.append(MetricsFile(self._directory / METRICS_FILE, first_step=first))
                if requirements.installed("tensorboard"):
                    self._recorders.append(TensorBoard(self._directory / "tensorboard"))
            if self._session.progress and self._ranks.is_first:
                self._recorders.append(Bar(steps, first_step=first))
            for recorder in self._recorders:
                stack.callback(recorder.close)
            if self._directory:
                stack.enter_context(self._interrupts)
            while torn := self._attempt(first, steps):
                first = self._back_to_checkpoint(torn)
        self._note_slow_loader()
        if self._directory:
            save_model(self._setup, self._directory / "model")
            if self._ranks.is_first:  # a run that was killed left half a checkpoint, and this one perhaps wrote none
                clean_up(self._directory / checkpoint.FOLDER)
        return self._history, list(self._evaluations.values())

    def _attempt(self, first: int, steps: int) -> OutOfMemoryError | None:
        """Run to the end; returns the error if memory ran out in an update, which only a checkpoint can undo."""
        after_step = functools.partial(self._after_step, steps=steps)
        own = self._session.callbacks if self._ranks.is_first else ()
        callbacks: tuple[Callback, ...] = (*own, *self._recorders, after_step)
        try:
            train(self._setup, self._epochs, steps=steps, first_step=first, callbacks=callbacks, listener=self._notify)
        except DivergedError as error:
            raise self._located(error) from None
        except OutOfMemoryError as error:
            if not error.torn:
                raise
            self._policy.save_batch_split(self._setup.config)
            if self._ranks.are_several:  # the others cannot go back by themselves
                error.knobs = {knob: self._setup.config[knob] for knob in FALLBACK_KNOBS}
                raise
            return error
        return None

    def _after_step(self, report: StepReport, steps: int) -> None:
        self._history.append(report)
        done = report.step + 1
        if self._setup.config != self._config:
            self._config = self._setup.config
            self._policy.save_batch_split(self._config)
        stopping = self._is_stopping(last=done == steps)
        if self._directory and (stopping or done % self._policy.checkpoint_every == 0 or done == steps):
            self._save(self._directory, done)
        if stopping:
            self._notify(f"stopped: the state after {counted(done, 'step')} is kept in {self._directory}.")
            self._interrupts.act()
        if self._eval_loader is not None and (done == steps or (self._epoch_length and done % self._epoch_length == 0)):
            with random_state.preserved(self._setup.device):  # a resumed run does not draw them again
                loss = evaluate(self._setup, batches_of(self._eval_loader))
            self._evaluations[report.step] = loss
            for recorder in self._recorders:
                recorder.evaluated(report.step, loss)

    def _is_stopping(self, *, last: bool) -> bool:
        """Whether a signal came, to any rank: all stop after the same step. One that came after a step's loss was added
        up over ranks is agreed on with the next one's."""
        if self._directory and self._ranks.are_several:
            if last:
                self._agree(list(self._ranks.largest(*self._signals())))
            if self._agreed is None:
                return False
            self._interrupts.received = self._agreed
        return self._interrupts.received is not None

    def _signals(self) -> list[float]:
        return [float(self._interrupts.received == each) for each in SIGNALS]

    def _agree(self, anywhere: list[float]) -> None:
        self._agreed = next((each for each, came in zip(SIGNALS, anywhere, strict=True) if came), None)

    def _note_interrupt(self, number: int) -> None:
        name = signal.Signals(number).name
        self._notify(f"{name}: stopping after this step, with a checkpoint; again: at once.")

    def _save(self, directory: Path, next_step: int) -> None:
        state = None
        try:
            state = json_state.encoded(self._epochs.state())
        except TypeError as error:
            if not self._is_counted:
                self._notify(
                    f"the state_dict of the loader holds a {error}, which no checkpoint does:"
                    " a resumed run reads again what comes before its step."
                )
            self._is_counted = True
        checkpoint.save(self._setup, directory, next_step, keep_last=self._policy.keep_last, data_state=state)

    def _resume(self) -> int:
        """Restore the last checkpoint, also in the middle of an epoch; returns the next step."""
        assert self._directory, "checked by the callers"
        loaded = checkpoint.load(self._setup, self._directory)
        self._epochs = Epochs(self._loader, self._session.hyperparameters.seed)
        for note in loaded.notes:
            self._notify(note)
        self._epochs.skip(loaded.next_step, loaded.data_state, self._setup.device)
        return loaded.next_step

    def _back_to_checkpoint(self, torn: OutOfMemoryError) -> int:
        failure = torn.message[:-1]
        if self._session.restart and self._directory:
            self._notify(f"{failure}: training goes on in a fresh process, from the last checkpoint.")
            self._session.restart()
        if self._directory is None or not checkpoint.exists(self._directory):
            remedy = "Load the weights again, and train with an output_dir and a smaller config."
            raise OutOfMemoryError(f"{failure}, and there is no checkpoint to go back to.", remedy)
        first = self._resume()
        self._history = [report for report in self._history if report.step < first]
        self._evaluations = {step: loss for step, loss in self._evaluations.items() if step < first}
        for recorder in self._recorders:
            recorder.back_to(first)
        checkpointed = f"training goes on from the checkpoint after {counted(first, 'step')}"
        self._notify(f"{failure}: {checkpointed}, with {_describe(self._setup.config)}.")
        return first

    def _located(self, error: DivergedError) -> AutofitError:
        """The error with the batch that caused it, after saving the weights before it."""
        message = f"{error.message[:-1]} ({self._epochs.position})"
        if self._directory:
            self._save(self._directory, error.step)
            message += f"; the state before it is kept in {self._directory}"
        return DivergedError(error.loss, error.step, f"{message}.")

    def _note_slow_loader(self) -> None:
        waiting = sum(report.data_seconds for report in self._history)
        total = waiting + sum(report.seconds for report in self._history)
        if waiting > _SLOW_LOADER_SECONDS and waiting / total > _SLOW_LOADER_SHARE:
            self._notify(
                f"the loader is too slow for this device: {waiting / total:.0%} of the time was spent waiting for data."
                " More num_workers, or data that is prepared before, would help."
            )


def _describe(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {config[knob]}" for knob in FALLBACK_KNOBS)
