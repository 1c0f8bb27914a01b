"""Judge: gives each finalist of a search the same seconds of training on the user's own data, and
compares losses."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit.api.train import train
from autofit.core.errors import AutofitError, InputError, require
from autofit.core.events import Listener, Note, PhaseStarted
from autofit.core.files import check_readable, expanded
from autofit.core.hardware import GIB
from autofit.core.learning import OBJECTIVES, LearningCurve, best_learner, check_judging
from autofit.core.learning_rates import default_learning_rate
from autofit.core.options import SearchOptions
from autofit.core.result import Result, SavedResult, tier
from autofit.core.workload import Hyperparameters, Workload
from autofit.models.config_json import check_weights
from autofit.probe import Executor
from autofit.report.learning import learning_lines
from autofit.training.loop import StepReport

SEEDS = (0, 1)
_MOST_STEPS = 2**31
_MOST_SECONDS = 1e6
_OVERHEAD_SECONDS = 600.0  # to load weights and data, and to compile
_SOURCES = ("preset", "directory", "hub")  # of models that a file can be read for


class _TimeUpError(Exception):
    """Ends a training whose seconds are used up."""


@dataclass(frozen=True)
class Judge:
    """How the finalists of a search are trained to compare what they learn.

    Attributes:
        data: the file to train on.
        weights: a directory or a hub id; None: random ones.
        seconds: of training, with each of two seeds.
        lr: the learning rate of all; None: each tier's own.
        objective: "loss-per-second" makes the config of the least loss the best one.
        trust_remote_code: whether the model may run code of its own.
        allow_missing: start what the weights lack, such as a new head, from random numbers.
    """

    data: str | Path
    weights: str | Path | None = None
    seconds: float = 60.0
    lr: float | None = None
    objective: str = OBJECTIVES[0]
    trust_remote_code: bool = False
    allow_missing: bool = False

    def __post_init__(self) -> None:
        check_judging("loss", self.objective, data=self.data)
        if self.lr is not None:
            Hyperparameters(lr=self.lr)
        fine = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        fine = fine and 0 < self.seconds <= _MOST_SECONDS
        require(fine, "the seconds of judging must be more than 0", self.seconds)

        check_readable(expanded(self.data, "data"), "the data file")
        if self.weights is not None:
            check_weights(self.weights)

    def check(self, workload: Workload, options: SearchOptions) -> None:
        """Raise an InputError where it cannot judge.

        That is a model that no file is read for, several devices, or a cluster.
        """
        if workload.source.get("kind") not in _SOURCES:
            message = "only named models are trained on a file, which judging does."
            remedy = "Leave out the judge, and compare configs with autofit.fit(config=...)."
            raise InputError(message, remedy)

        if options.devices != 1 or options.nodes != 1 or options.executor != "local":
            message = "configs are judged on one device of this machine."
            raise InputError(message, "Leave out the judge.")

    def __call__(self, result: Result, executor: Executor, listener: Listener) -> Result:
        """The result with what its finalists learn. Ctrl-C ends it with what is known by then."""
        finalists = (result.best, *result.tiers.values(), *result.finalists)
        measured = {finalist.config: finalist for finalist in finalists if finalist}
        curves = {config: LearningCurve(config) for config in measured}
        seconds = 2 * self.seconds
        listener(PhaseStarted(f"training {len(curves)} finalists for {seconds:.0f} s each"))
        try:
            for seed in SEEDS:
                for config, curve in curves.items():
                    curves[config] = self._follow(curve, result, executor, seed)
        except KeyboardInterrupt:
            result = dataclasses.replace(result, stopped_by="interrupt")

        learning = tuple(curves.values())
        start = "random weights" if self.weights is None else self.weights
        head = f"From {start}, {self.seconds:g} s of training on {Path(self.data).name}"
        head += f" with each of {len(SEEDS)} seeds, at "
        if self.lr is None:
            rates = sorted({default_learning_rate(config) for config in measured})
            head += f"each tier's own learning rate ({', '.join(f'{rate:g}' for rate in rates)})"
        else:
            head += f"a learning rate of {self.lr:g}"
        lines = learning_lines(learning, head)
        for line in lines:
            listener(Note(line))
        result = dataclasses.replace(result, learning=learning, notes=(*result.notes, *lines))

        first = best_learner(learning)
        is_asked_for = self.objective == "loss-per-second"
        if is_asked_for and first and result.best and first.config != result.best.config:
            best = measured[first.config]
            result = dataclasses.replace(
                result,
                best=best,
                runner_up=result.best,
                tiers={**result.tiers, tier(best.config): best},
            )
        return result

    def _follow(
        self,
        curve: LearningCurve,
        result: Result,
        executor: Executor,
        seed: int,
    ) -> LearningCurve:
        """The curve with one more run of its config, or with the reason why there is none."""
        if curve.reason:
            return curve

        hardware = {
            "device": result.hardware.device,
            "budget_gib": result.budget.device_bytes / GIB,
        }
        saved = SavedResult(
            result.model,
            result.workload,
            result.source,
            hardware,
            curve.config,
            {},
        )
        try:
            seconds, losses = executor.run(
                _learn,
                None,
                saved,
                self,
                seed,
                log=f"judge-{seed}.log",
                timeout=3 * self.seconds + _OVERHEAD_SECONDS,
                task="training a finalist",
            )
        except AutofitError as error:
            return dataclasses.replace(curve, reason=error.message)
        return curve.with_run(seconds, losses)


def _learn(_: None, saved: SavedResult, judge: Judge, seed: int) -> tuple[list[float], list[float]]:
    """The seconds and the loss of each step, in a process of its own."""
    seconds: list[float] = []
    losses: list[float] = []

    def follow(step: StepReport) -> None:
        seconds.append(step.seconds)
        losses.append(step.loss)
        if sum(seconds[1:]) >= judge.seconds:
            raise _TimeUpError

    with suppress(_TimeUpError):
        train(
            saved,
            Path(judge.data),
            weights=judge.weights,
            allow_missing=judge.allow_missing,
            trust_remote_code=judge.trust_remote_code,
            lr=judge.lr,
            steps=_MOST_STEPS,
            seed=seed,
            callbacks=(follow,),
        )
    return seconds, losses
