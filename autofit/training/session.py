"""One training of the user's model with a known config: build, resume, run, evaluate, save,
restore."""

import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from autofit.core.config_faults import config_faults_named
from autofit.core.errors import (
    AutofitError,
    DivergedError,
    OutOfMemoryError,
    describe_error,
    pluralize,
)
from autofit.core.hardware import Hardware
from autofit.core.layout import largest_divisor, part_of
from autofit.core.workload import Hyperparameters, Workload
from autofit.setup import Setup, requirements
from autofit.training import checkpoint, json_state, random_state
from autofit.training.agreed_interrupts import AgreedInterrupts
from autofit.training.atomic_writes import clean_up
from autofit.training.best_weights import BestWeights
from autofit.training.checkpoint_files import FOLDER
from autofit.training.checkpoint_policy import (
    CheckpointPolicy,
    batch_split_of,
    describe_batch_split,
)
from autofit.training.epochs import Epochs
from autofit.training.evaluation import (
    Evaluation,
    EvaluationPlan,
    check_evaluation,
    evaluation_of,
)
from autofit.training.local_batch import local_loader
from autofit.training.loop import (
    STOP,
    Callback,
    Listener,
    ModelCallback,
    StepReport,
    Stop,
    train,
)
from autofit.training.metrics import (
    Bar,
    MetricsFile,
    ProgressLines,
    Recorder,
    TensorBoard,
    recorded,
)
from autofit.training.prepared import Prepared, on_device
from autofit.training.reference_column import fill_reference
from autofit.training.save_model import save_model
from autofit.training.workload import batches_of, length_of

_SLOW_LOADER_SHARE = 0.1  # of the time
_SLOW_LOADER_SECONDS = 0.2  # in all
METRICS_FILE = "metrics.jsonl"

Answer = tuple[list[StepReport], list[Evaluation]]  # a training's reports and evaluations


@dataclass(frozen=True)
class Session:
    """What is trained, how it learns, and who listens.

    `callbacks` get the report of every step, on the first rank; `listener` gets sentences.
    `restart` is called where memory ran out in the middle of an update, to resume in a fresh
    process; without it this process goes back to the last checkpoint. `taken` gets the trained
    setup, whose model then need not come back as it was: the process ends.
    """

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
        evaluation: EvaluationPlan | None = None,
    ) -> Answer:
        """Train the model in place and restore its modes; returns the reports and the evaluations.

        `epochs`: the passes that the steps make up. A run that is resumed with another batch size
        makes them in other steps.
        """
        with on_device(self.workload, self.model, device, self.listener) as hardware:
            prepared = Prepared(
                self.workload,
                self.model,
                {**config, **self._batch_split(config, hardware)},
                hardware,
                self.hyperparameters,
                self.listener,
                is_evaluated=evaluation is not None,
            )

            setup = prepared.setup

            try:
                if self.policy.directory:
                    checkpoint.check_savable(setup)

                loaders = [loader, evaluation.loader] if evaluation else [loader]
                fill_reference(setup, loaders, self.policy.directory, self.listener)
                if evaluation is not None:
                    with random_state.preserved(setup.device):
                        check_evaluation(setup, evaluation)

                with config_faults_named():
                    training = _Training(self, prepared, loader, evaluation)
                    answer = training.run(steps, epochs)

                if self.taken:
                    self.taken(setup)
                return answer
            finally:
                if not self.taken:
                    prepared.close()

    def _batch_split(self, config: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
        """The smaller micro-batch of a run that ran out of memory, perhaps on more or fewer
        devices."""
        saved = self.policy.batch_split(hardware)
        if not saved:
            return {}

        part = part_of(config, hardware.world, self.workload.effective_batch_size)
        most = min(saved["micro_batch_size"], config.get("micro_batch_size") or part)
        micro = largest_divisor(part, most)
        split = {
            **saved,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": part // micro,
        }

        words = describe_batch_split(split)
        self.listener(f"memory ran out in this run before, so it goes on with {words}.")
        return split


class _Training:
    """A session from its build to its last step."""

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        loader: Any,
        evaluation: EvaluationPlan | None,
    ) -> None:
        setup = prepared.setup
        self._session = session
        self._setup = setup
        self._ranks = setup.ranks
        self._prover = prepared.prover
        self._policy = session.policy
        self._notify = session.listener
        self._directory = session.policy.directory

        self._loader = local_loader(loader, setup.ranks)
        self._evaluation_plan = evaluation
        self._eval_loader = None
        self._best: BestWeights | None = None

        if evaluation is not None:
            self._eval_loader = local_loader(evaluation.loader, setup.ranks)
            if evaluation.best_by is not None:
                is_resumed = self._policy.resume
                self._best = BestWeights(setup, self._directory, is_resumed=is_resumed)

        self._epochs = self._at_the_start()
        self._epoch_length = length_of(loader)
        self._is_counted = False  # the position in the data, because a checkpoint cannot hold it

        self._config = setup.config
        self._done = 0  # steps
        self._saved = 0  # the last step that a checkpoint has
        self._history: list[StepReport] = []
        self._resumed_steps = 0  # of the history, which an earlier process made
        self._evaluations: dict[int, Evaluation] = {}  # by the step before them
        self._recorders: list[Recorder] = []
        self._is_unlabelled_said = False

        # Perhaps given to the first rank alone.
        (has_callbacks,) = self._ranks.largest(float(bool(session.callbacks)))
        self._has_callbacks = bool(has_callbacks)
        self._is_ended_by_callback = False

        self._interrupts: AgreedInterrupts | None = None
        if self._directory:
            self._interrupts = AgreedInterrupts(setup, self._note_interrupt)

    def _at_the_start(self) -> Epochs:
        """The data before the first step."""
        workload = self._setup.workload
        seed = self._session.hyperparameters.seed

        return Epochs(
            self._loader,
            seed,
            batch_size=workload.effective_batch_size,
            cut=workload.split,
        )

    def run(self, steps: int, epochs: int | None) -> Answer:
        """Train up to so many steps, or epochs, in all, from wherever the run stands."""
        first = 0
        if self._policy.resume and self._has_checkpoint():
            first = self._resume()
            steps = self._last_step(first, steps, epochs)

        if first and first == steps:
            self._notify(f"nothing is left to train: the run has done {pluralize(first, 'step')}.")
        if first > steps:
            done = pluralize(first, "step")
            self._notify(
                f"the run has done {done} already, more than the {steps} it was to go on to."
            )

        with ExitStack() as stack:
            self._open_recorders(first, steps)
            for recorder in self._recorders:
                stack.callback(recorder.close)
            if self._interrupts:
                stack.enter_context(self._interrupts)

            if first < steps:
                self._ask_model(first)
            while torn := self._attempt(first, steps):
                first = self._back_to_checkpoint(torn)
            if self._done and self._done not in self._evaluations:
                self._evaluate()  # a run that was ended before it could

        self._go_back_to_best()
        self._note_skipped_steps()
        self._note_slow_loader()
        if self._directory:
            save_model(self._setup, self._directory / "model")
            # A run that was killed left half a checkpoint, and this one perhaps wrote none.
            if self._ranks.is_first:
                clean_up(self._directory / FOLDER)

        return self._history, list(self._evaluations.values())

    def _open_recorders(self, first: int, steps: int) -> None:
        """Open what records steps and evaluations, on the first rank."""
        if not self._ranks.is_first:
            return
        if self._directory:
            path = self._directory / METRICS_FILE
            self._recorders.append(MetricsFile(path, first_step=first))
            if requirements.installed("tensorboard"):
                self._recorders.append(TensorBoard(self._directory / "tensorboard"))

        if self._session.progress:
            progress = Bar if Bar.wanted() else ProgressLines
            self._recorders.append(progress(steps, first_step=first))

    def _attempt(self, first: int, steps: int) -> OutOfMemoryError | None:
        """Run to the end.

        Returns the error if memory ran out in an update, which only a checkpoint can undo.
        """
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
                error.knobs = batch_split_of(self._setup.config)
                raise

            return error
        except Exception as error:
            self._save_after(error)
            raise

        return None

    def _batches(self) -> Iterator[Any]:
        """The batches; where one cannot be read, torch's random numbers are as before the
        attempt."""
        while True:
            before = random_state.capture_torch(self._setup.device)
            try:
                batch = next(self._epochs)
            except Exception:
                random_state.restore(before, self._setup.device)
                raise

            yield batch

    def _save_after(self, error: Exception) -> None:
        """Save what was trained before a loader or loss failed, where a checkpoint lacks it.

        A step that a callback did not let end is not in the metrics either, so it is made again.
        """
        directory = self._directory
        is_whole = self._setup.progress.is_whole and not self._is_ended_by_callback
        if directory is None or self._ranks.are_several or not is_whole:
            return
        if self._done == self._saved:
            return

        reason = describe_error(error)
        try:
            self._save(directory, self._done)
        except Exception as another:
            why = describe_error(another)
            self._notify(f"{reason}: no checkpoint could be saved after it ({why}).")
        else:
            done = pluralize(self._done, "step")
            self._notify(f"{reason}: the state after {done} is kept in {directory}.")

    def _after_step(self, report: StepReport, steps: int) -> Stop | None:
        """Call the callbacks, save and evaluate; STOP where a callback ends training."""
        report = replace(report, evaluations=tuple(self._evaluations.values()))
        self._epochs.done(report.samples)
        self._done = report.step
        is_stopped = self._is_stopped_by_callback(report)
        is_last = is_stopped or report.step == steps
        for recorder in self._recorders:
            recorder(report)

        self._history.append(report)

        if report.skipped == "no label" and not self._is_unlabelled_said:
            self._notify(
                f"the batch of step {report.step} has no label that counts: "
                "nothing is learnt from it."
            )
            self._is_unlabelled_said = True

        if self._setup.config != self._config:
            self._config = self._setup.config
            self._policy.save_batch_split(self._config)

        self._save_if_due(is_last=is_last)
        if is_last or self._is_evaluation_due():
            self._evaluate()
        self._ask_model(report.step)

        if not is_stopped:
            return None

        done = pluralize(report.step, "step")
        self._notify(f"a callback ended the training after {done} of {steps}.")
        return STOP

    def _is_stopped_by_callback(self, report: StepReport) -> bool:
        """Whether a callback ends training, which those of the first rank decide for all."""
        is_stopped = False
        if self._ranks.is_first:
            try:
                for callback in self._session.callbacks:
                    is_stopped |= callback(report) is STOP
            except Exception:
                self._is_ended_by_callback = True
                raise

        if self._ranks.are_several and self._has_callbacks:
            (anywhere,) = self._ranks.largest(float(is_stopped))
            is_stopped = bool(anywhere)

        return is_stopped

    def _save_if_due(self, *, is_last: bool) -> None:
        """Save every so many steps, and where training ends, as it does after a signal."""
        if self._directory is None or self._interrupts is None:
            return

        is_interrupted = self._interrupts.came(is_last=is_last)
        is_due = self._done % self._policy.checkpoint_every == 0
        if is_interrupted or is_due or is_last:
            self._save(self._directory, self._done)

        if is_interrupted:
            done = pluralize(self._done, "step")
            self._notify(f"stopped: the state after {done} is kept in {self._directory}.")
            self._interrupts.act()

    def _is_evaluation_due(self) -> bool:
        plan = self._evaluation_plan
        if plan is None or plan.every is None:
            return self._epochs.batches_done == self._epoch_length

        return self._done % plan.every == 0

    def _evaluate(self) -> None:
        """Note what held-out data say, where there are any, and keep the best weights."""
        plan = self._evaluation_plan
        if plan is None:
            return

        with random_state.preserved(self._setup.device):  # a resumed run does not draw them again
            batches = batches_of(self._eval_loader)
            evaluation = evaluation_of(self._setup, plan, batches, self._done)

        if self._best:
            # The same on all ranks, also where a metric of the user's draws random numbers.
            (score,) = self._ranks.largest(plan.score(evaluation))
            self._best.offer(self._done, score)

        self._evaluations[self._done] = evaluation
        for recorder in self._recorders:
            recorder.evaluated(evaluation)

    def _ask_model(self, step: int) -> None:
        """Let those callbacks ask the model that want to."""
        for callback in self._session.callbacks:
            if isinstance(callback, ModelCallback):
                with random_state.preserved(self._setup.device):
                    callback.ask(self._setup, step)

    def _go_back_to_best(self) -> None:
        """Load the weights that evaluated best, where the last ones are others."""
        best = self._best
        if best is None or best.step in (None, self._done):
            return

        best.restore()
        steps = pluralize(int(best.step or 0), "step")
        self._notify(f"the model has the weights after {steps}, which evaluated best.")

    def _note_interrupt(self, number: int) -> None:
        """Say that a signal came."""
        name = signal.Signals(number).name
        self._notify(f"{name}: stopping after this step, with a checkpoint; again: at once.")

    def _save(self, directory: Path, next_step: int) -> None:
        """Write a checkpoint, with the position in the data."""
        self._saved = next_step
        try:
            state = json_state.encoded(self._epochs.state())
        except TypeError as error:
            state = json_state.encoded(self._epochs.state(with_loader=False))
            if not self._is_counted:
                self._notify(
                    f"the state_dict of the loader holds a {error}, which no checkpoint does: "
                    "a resumed run reads again what comes before its step."
                )

            self._is_counted = True

        checkpoint.save(
            self._setup,
            directory,
            next_step,
            keep_last=self._policy.keep_last,
            data_state=state,
        )

    def _has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to go back to."""
        return self._directory is not None and checkpoint.exists(self._directory)

    def _resume(self) -> int:
        """Restore the last checkpoint, also in the middle of an epoch; returns the next step."""
        assert self._directory, "checked by the callers"
        loaded = checkpoint.load(self._setup, self._directory)
        notes = list(loaded.notes)

        self._epochs = self._at_the_start()
        data_state = loaded.data_state
        if data_state is None or "samples" not in data_state:  # as an earlier autofit saved it
            self._epochs.skip_batches(loaded.next_step, self._setup.device)
        else:
            notes += self._epochs.skip(data_state, self._setup.device)

        for note in notes:
            self._notify(note)
        if not self._history:  # what an earlier process recorded
            path = self._directory / METRICS_FILE
            self._history, evaluations = recorded(path, loaded.next_step)
            self._resumed_steps = len(self._history)
            self._evaluations = {evaluation.step: evaluation for evaluation in evaluations}

        self._done = loaded.next_step
        self._saved = loaded.next_step
        return loaded.next_step

    def _last_step(self, first: int, steps: int, epochs: int | None) -> int:
        """The number of steps in all of a resumed run that is to make so many epochs."""
        if epochs is None:
            return steps

        total = first + self._epochs.batches_left(steps // epochs, epochs)
        if total != steps:
            passes = pluralize(epochs, "epoch")
            self._notify(f"for {passes} in all the run ends after {pluralize(total, 'step')}.")

        return total

    def _back_to_checkpoint(self, torn: OutOfMemoryError) -> int:
        """Go back after an update that ran out of memory; returns the next step."""
        failure = torn.message[:-1]
        if self._session.restart and self._directory:
            self._notify(
                f"{failure}: training goes on in a fresh process, from the last checkpoint."
            )
            self._session.restart()

        if not self._has_checkpoint():
            raise OutOfMemoryError(
                f"{failure}, and there is no checkpoint to go back to.",
                "Load the weights again, and train with an output_dir and a smaller config.",
            )

        first = self._resume()
        self._history = [report for report in self._history if report.step <= first]
        for step in list(self._evaluations):
            if step > first:
                del self._evaluations[step]

        for recorder in self._recorders:
            recorder.back_to(first)

        words = describe_batch_split(self._setup.config)
        self._notify(
            f"{failure}: training goes on from the checkpoint after {pluralize(first, 'step')}, "
            f"with {words}."
        )

        return first

    def _located(self, error: DivergedError) -> AutofitError:
        """The error with the batch that caused it, after saving the weights before it."""
        message = f"{error.message[:-1]} ({self._epochs.position})"
        if self._directory:
            self._save(self._directory, error.step - 1)
            message += f"; the state before it is kept in {self._directory}"

        return DivergedError(error.loss, error.step, f"{message}.")

    def _note_skipped_steps(self) -> None:
        reasons = [report.skipped for report in self._history[self._resumed_steps :]]
        overflows = reasons.count("overflow")
        unlabelled = reasons.count("no label")
        steps = pluralize(len(reasons), "step")

        if overflows:
            self._notify(
                f"the loss scaler of fp16-mixed skipped {overflows} of {steps}, whose gradients "
                "overflowed: the schedule was held back for them."
            )

        if unlabelled > 1:  # the first one was told of
            self._notify(
                f"the batches of {unlabelled} of {steps} had no label that counts: "
                "nothing was learnt."
            )

    def _note_slow_loader(self) -> None:
        reports = self._history[self._resumed_steps :]
        waiting = sum(report.data_seconds for report in reports)
        total = waiting + sum(report.seconds for report in reports)

        if waiting > _SLOW_LOADER_SECONDS and waiting / total > _SLOW_LOADER_SHARE:
            self._notify(
                f"the loader is too slow for this device: {waiting / total:.0%} of the time was "
                "spent waiting for data. More num_workers, or data that is prepared before, would "
                "help."
            )
