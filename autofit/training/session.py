"""One training of the user's model with a known config: build, resume, run, evaluate, save, and restore."""

import dataclasses
import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from autofit.core.config_faults import config_faults_named
from autofit.core.errors import (
    AutofitError,
    DivergedError,
    InputError,
    OutOfMemoryError,
    describe_error,
    is_whole,
    pluralize,
    require,
    sentence,
)
from autofit.core.files import write_atomically
from autofit.core.hardware import Hardware
from autofit.core.interrupts import SIGNALS, Interrupts
from autofit.core.layout import Layout, largest_divisor, part_of
from autofit.core.strict_yaml import dump, load_mapping
from autofit.core.workload import Hyperparameters, Rows, Workload, check_counts
from autofit.data.batch import few_samples
from autofit.distributed.group import devices_of_group
from autofit.hardware import segments
from autofit.hardware.device import detect
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup, requirements
from autofit.setup.adapters import new_token_rows
from autofit.techniques import check
from autofit.training import checkpoint, json_state, random_state
from autofit.training.atomic_writes import clean_up
from autofit.training.build import build
from autofit.training.epochs import Epochs
from autofit.training.evaluation import check_evaluation, evaluate
from autofit.training.inspect import Prover, try_loss
from autofit.training.local_batch import local_loader
from autofit.training.loop import SEARCH_AGAIN, STOP, Callback, Listener, StepReport, Stop, train
from autofit.training.metrics import Bar, MetricsFile, Recorder, TensorBoard
from autofit.training.oom_recovery import FALLBACK_KNOBS
from autofit.training.packed_samples import note_of_mixed_samples
from autofit.training.save_model import save_model
from autofit.training.user_model import restored
from autofit.training.workload import batches_of, length_of

_SLOW_LOADER_SHARE = 0.1  # of the time
_SLOW_LOADER_SECONDS = 0.2  # in all
METRICS_FILE = "metrics.jsonl"
BATCH_SPLIT_FILE = "after-out-of-memory.yaml"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run is saved (None: nowhere), how often in steps, and how many of the last checkpoints are retained."""

    directory: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    keep_last: int = 2

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=self.checkpoint_every, keep_last=self.keep_last)

    def batch_split(self, hardware: Hardware) -> dict[str, Any]:
        """The knobs that a resumed run changed when it ran out of memory; empty where it never did."""
        path = self.directory / BATCH_SPLIT_FILE if self.directory else None
        if not self.resume or path is None or not path.exists():
            return {}
        held = load_mapping(path)
        try:
            require(
                held.keys() == set(FALLBACK_KNOBS),
                "its knobs must be those that a run may change",
                list(held),
            )
            require(
                is_whole(held["micro_batch_size"], 1), "its micro_batch_size must be a number", held
            )
            check(held, hardware)
        except InputError as error:
            raise InputError(
                f"{path} is not as a training writes it: {error.message}", "Delete it."
            ) from error
        return held

    def save_batch_split(self, config: Mapping[str, Any]) -> None:
        """Save what `Recovery` may change, so that a resumed run does not run out of memory again."""
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(
                self.directory / BATCH_SPLIT_FILE,
                dump({knob: config[knob] for knob in FALLBACK_KNOBS}),
            )


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
        self,
        config: Mapping[str, Any],
        device: str | None,
        loader: Any,
        *,
        steps: int,
        epochs: int | None = None,
        eval_loader: Any = None,
    ) -> tuple[list[StepReport], list[float]]:
        """Train the model in place and restore its modes; returns the reports and the evaluations. `epochs`: the passes
        that these are the steps of, which a run resumed with another batch size makes in other steps."""
        torch.manual_seed(self.hyperparameters.seed)
        self.model.zero_grad()  # earlier gradients would be added to those of the first step
        restore_dtypes = self.workload.keeps is not None
        restoring = restored(self.model, dtypes=restore_dtypes)
        with _shortage_told(), segments.as_in_probes(device, self.listener), restoring:
            hardware = detect(device).of_several(*devices_of_group())
            batch_split = self.policy.batch_split(hardware)
            if batch_split:  # perhaps of another number of devices
                part = part_of(config, hardware.world, self.workload.effective_batch_size)
                micro = largest_divisor(
                    part,
                    min(batch_split["micro_batch_size"], config.get("micro_batch_size") or part),
                )
                batch_split |= {
                    "micro_batch_size": micro,
                    "gradient_accumulation_steps": part // micro,
                }
                self.listener(
                    f"memory ran out in this run before, so it goes on with {_describe(batch_split)}."
                )
            config = {**config, **batch_split}
            prover = Prover.of(self.workload, self.model, hardware)
            workload = self._proven(prover, config, is_evaluated=eval_loader is not None)
            setup = build(
                workload, config, hardware, model=self.model, hyperparameters=self.hyperparameters
            )
            for note in (*hardware.notes, *setup.warnings, *_untrained_rows(self.model)):
                self.listener(note)
            try:
                if self.policy.directory:
                    checkpoint.check_savable(setup)
                with random_state.preserved(setup.device):
                    try_loss(setup)
                    batch = few_samples(self.workload, 2)
                    # else a file's, packed for what is known to keep them apart
                    if not isinstance(batch, Rows):
                        mixed = note_of_mixed_samples(setup, batch)
                        if mixed:
                            self.listener(mixed)
                    if eval_loader is not None:
                        check_evaluation(setup, eval_loader)
                with config_faults_named():
                    answer = _Training(self, setup, loader, eval_loader, prover).run(steps, epochs)
                if self.taken:
                    self.taken(setup)
                return answer
            finally:
                if not self.taken:
                    setup.close()

    def _proven(self, prover: Prover, config: Mapping[str, Any], *, is_evaluated: bool) -> Workload:
        """The workload with what its loss averages over, where that matters: where a batch is split. Raises InputError
        where it cannot be."""
        whole = self.workload.effective_batch_size
        samplers = Layout.of(config).samplers
        is_split = samplers > 1 or (config.get("micro_batch_size") or whole) < whole
        if not is_split and not is_evaluated:
            return self.workload
        traits = prover.traits()
        if is_split and not traits.splits:
            remedy = f"Set micro_batch_size to {whole}, or leave the config to the search."
            raise InputError(traits.notes[-1], "Train on one device." if samplers > 1 else remedy)
        for note in traits.notes:
            if note not in self.workload.notes:
                self.listener(note)
        return dataclasses.replace(self.workload, traits=traits)


def _untrained_rows(model: nn.Module) -> list[str]:
    """A note on rows that were added to a token embedding which is frozen."""
    rows = new_token_rows(model)
    if not rows:
        return []
    note = (
        f"the token embedding has {pluralize(rows, 'row')} more than the model it was loaded from"
    )
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
        raise OutOfMemoryError(
            f"memory ran out outside of a step: {sentence(error)}.", SEARCH_AGAIN
        ) from error


class _Training:
    """A session from its build to its last step."""

    def __init__(
        self, session: Session, setup: Setup, loader: Any, eval_loader: Any, prover: Prover
    ) -> None:
        self._session = session
        self._setup = setup
        self._ranks = setup.ranks
        self._prover = prover
        self._policy = session.policy
        self._notify = session.listener
        self._directory = session.policy.directory
        self._loader = local_loader(loader, setup.ranks)
        self._eval_loader = None if eval_loader is None else local_loader(eval_loader, setup.ranks)
        self._epochs = self._at_the_start()
        self._epoch_length = length_of(loader)
        self._history: list[StepReport] = []
        self._evaluations: dict[int, float] = {}  # by the step before them
        self._is_unlabelled_said = False
        self._is_ended_by_callback = False
        self._recorders: list[Recorder] = []
        self._config = setup.config
        self._done = 0  # steps
        self._saved = 0  # the last step that a checkpoint has
        self._is_counted = False  # the position in the data, because a checkpoint cannot hold it
        self._interrupts = Interrupts(self._note_interrupt)
        # perhaps given to the first rank alone
        (has_callbacks,) = self._ranks.largest(float(bool(session.callbacks)))
        self._has_callbacks = bool(has_callbacks)
        self._agreed: int | None = (
            None  # a signal that came to any of several ranks before a step's loss was known
        )
        if self._directory and self._ranks.are_several:
            setup.exchange.extra_reductions.append((self._signals, self._agree))

    def _at_the_start(self) -> Epochs:
        """The data before the first step."""
        workload = self._setup.workload
        seed = self._session.hyperparameters.seed
        return Epochs(
            self._loader, seed, batch_size=workload.effective_batch_size, cut=workload.split
        )

    def run(self, steps: int, epochs: int | None) -> tuple[list[StepReport], list[float]]:
        """Train up to that many steps in all, or to the end of so many epochs, from wherever the run stands."""
        is_resumed = (
            self._policy.resume
            and self._directory is not None
            and checkpoint.exists(self._directory)
        )
        first = 0
        if is_resumed:
            first = self._resume()
            steps = self._last_step(first, steps, epochs)
        if first > steps:
            done = pluralize(first, "step")
            self._notify(
                f"the run has done {done} already, more than the {steps} it was to go on to."
            )
        with ExitStack() as stack:
            if self._directory and self._ranks.is_first:
                self._recorders.append(
                    MetricsFile(self._directory / METRICS_FILE, first_step=first)
                )
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
        self._note_skipped_steps()
        self._note_slow_loader()
        if self._directory:
            save_model(self._setup, self._directory / "model")
            # a run that was killed left half a checkpoint, and this one perhaps wrote none
            if self._ranks.is_first:
                clean_up(self._directory / checkpoint.FOLDER)
        return self._history, list(self._evaluations.values())

    def _attempt(self, first: int, steps: int) -> OutOfMemoryError | None:
        """Run to the end; returns the error if memory ran out in an update, which only a checkpoint can undo."""
        after_step = functools.partial(self._after_step, steps=steps)
        try:
            train(
                self._setup,
                self._batches(),
                steps=steps,
                first_step=first,
                callbacks=(after_step,),
                listener=self._notify,
                prover=self._prover,
            )
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
        except Exception as error:
            self._save_after(error)
            raise
        return None

    def _batches(self) -> Iterator[Any]:
        """The batches. Where one cannot be read, torch's random numbers are as if nobody had tried."""
        while True:
            before = random_state.capture_torch(self._setup.device)
            try:
                batch = next(self._epochs)
            except Exception:
                random_state.restore(before, self._setup.device)
                raise
            yield batch

    def _save_after(self, error: Exception) -> None:
        """Save what was trained before somebody's loader or loss failed, where a checkpoint lacks it. A step that a
        callback did not let end is not told of in the metrics either, so it is made again."""
        directory = self._directory
        done = self._done
        if (
            directory is None
            or self._ranks.are_several
            or not self._setup.progress.is_whole
            or done == self._saved
        ):
            return
        if self._is_ended_by_callback:
            return
        try:
            self._save(directory, done)
        except Exception as another:
            self._notify(
                f"{describe_error(error)}: no checkpoint could be saved after it ({describe_error(another)})."
            )
            return
        self._notify(
            f"{describe_error(error)}: the state after {pluralize(done, 'step')} is kept in {directory}."
        )

    def _after_step(self, report: StepReport, steps: int) -> Stop | None:
        """Call the callbacks, save and evaluate; STOP where a callback ends training."""
        self._epochs.done(report.samples)
        done = self._done = report.step
        is_stopped = self._is_stopped_by_callback(report)
        is_last = is_stopped or done == steps
        for recorder in self._recorders:
            recorder(report)
        self._history.append(report)

        if report.skipped == "no label" and not self._is_unlabelled_said:
            self._notify(
                f"the batch of step {report.step} has no label that counts: nothing is learnt from it."
            )
            self._is_unlabelled_said = True

        if self._setup.config != self._config:
            self._config = self._setup.config
            self._policy.save_batch_split(self._config)

        stopping = self._is_stopping(last=is_last)
        if self._directory and (stopping or done % self._policy.checkpoint_every == 0 or is_last):
            self._save(self._directory, done)
        if stopping:
            self._notify(
                f"stopped: the state after {pluralize(done, 'step')} is kept in {self._directory}."
            )
            self._interrupts.act()

        ends_pass = self._epochs.batches_done == self._epoch_length
        if self._eval_loader is not None and (is_last or ends_pass):
            # a resumed run does not draw them again
            with random_state.preserved(self._setup.device):
                loss = evaluate(self._setup, batches_of(self._eval_loader))
            self._evaluations[report.step] = loss
            for recorder in self._recorders:
                recorder.evaluated(report.step, loss)

        if not is_stopped:
            return None
        self._notify(f"a callback ended the training after {pluralize(done, 'step')} of {steps}.")
        return STOP

    def _is_stopped_by_callback(self, report: StepReport) -> bool:
        """Whether a callback ends training, which those of the first rank decide for all."""
        answers: list[object] = []
        if self._ranks.is_first:
            try:
                answers = [callback(report) for callback in self._session.callbacks]
            except Exception:
                self._is_ended_by_callback = True
                raise
        is_stopped = any(answer is STOP for answer in answers)
        if self._ranks.are_several and self._has_callbacks:
            (anywhere,) = self._ranks.largest(float(is_stopped))
            is_stopped = bool(anywhere)
        return is_stopped

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
        self._agreed = next(
            (each for each, came in zip(SIGNALS, anywhere, strict=True) if came), None
        )

    def _note_interrupt(self, number: int) -> None:
        name = signal.Signals(number).name
        self._notify(f"{name}: stopping after this step, with a checkpoint; again: at once.")

    def _save(self, directory: Path, next_step: int) -> None:
        self._saved = next_step
        try:
            state = json_state.encoded(self._epochs.state())
        except TypeError as error:
            state = json_state.encoded(self._epochs.state(with_loader=False))
            if not self._is_counted:
                self._notify(
                    f"the state_dict of the loader holds a {error}, which no checkpoint does:"
                    " a resumed run reads again what comes before its step."
                )
            self._is_counted = True
        checkpoint.save(
            self._setup, directory, next_step, keep_last=self._policy.keep_last, data_state=state
        )

    def _resume(self) -> int:
        """Restore the last checkpoint, also in the middle of an epoch; returns the next step."""
        assert self._directory, "checked by the callers"
        loaded = checkpoint.load(self._setup, self._directory)
        self._epochs = self._at_the_start()
        notes = list(loaded.notes)
        # as an earlier autofit saved it
        if loaded.data_state is None or "samples" not in loaded.data_state:
            self._epochs.skip_batches(loaded.next_step, self._setup.device)
        else:
            notes += self._epochs.skip(loaded.data_state, self._setup.device)
        for note in notes:
            self._notify(note)
        self._done = self._saved = loaded.next_step
        return loaded.next_step

    def _last_step(self, first: int, steps: int, epochs: int | None) -> int:
        """The number of steps in all of a resumed run that is to make so many epochs."""
        if epochs is None:
            return steps
        total = first + self._epochs.batches_left(steps // epochs, epochs)
        if total != steps:
            self._notify(
                f"for {pluralize(epochs, 'epoch')} in all the run ends after {pluralize(total, 'step')}."
            )
        return total

    def _back_to_checkpoint(self, torn: OutOfMemoryError) -> int:
        failure = torn.message[:-1]
        if self._session.restart and self._directory:
            self._notify(
                f"{failure}: training goes on in a fresh process, from the last checkpoint."
            )
            self._session.restart()
        if self._directory is None or not checkpoint.exists(self._directory):
            remedy = "Load the weights again, and train with an output_dir and a smaller config."
            raise OutOfMemoryError(f"{failure}, and there is no checkpoint to go back to.", remedy)
        first = self._resume()
        self._history = [report for report in self._history if report.step <= first]
        self._evaluations = {
            step: loss for step, loss in self._evaluations.items() if step <= first
        }
        for recorder in self._recorders:
            recorder.back_to(first)
        checkpointed = f"training goes on from the checkpoint after {pluralize(first, 'step')}"
        self._notify(f"{failure}: {checkpointed}, with {_describe(self._setup.config)}.")
        return first

    def _located(self, error: DivergedError) -> AutofitError:
        """The error with the batch that caused it, after saving the weights before it."""
        message = f"{error.message[:-1]} ({self._epochs.position})"
        if self._directory:
            self._save(self._directory, error.step - 1)
            message += f"; the state before it is kept in {self._directory}"
        return DivergedError(error.loss, error.step, f"{message}.")

    def _note_skipped_steps(self) -> None:
        reasons = [report.skipped for report in self._history]
        overflows = reasons.count("overflow")
        unlabelled = reasons.count("no label")
        of_all = f"of {pluralize(len(self._history), 'step')}"
        if overflows:
            self._notify(
                f"the loss scaler of fp16-mixed skipped {overflows} {of_all}, whose gradients overflowed: the schedule"
                " was held back for them."
            )
        if unlabelled > 1:  # the first one was told of
            self._notify(
                f"the batches of {unlabelled} {of_all} had no label that counts: nothing was learnt."
            )

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
