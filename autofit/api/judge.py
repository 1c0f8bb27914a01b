"""Judge: gives each finalist of a search the same seconds of training on the user's own data, and
compares losses."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.api.train import train
from autofit.core.errors import AutofitError, InputError, require
from autofit.core.events import Listener, Note, PhaseStarted
from autofit.core.files import check_readable, expanded
from autofit.core.hardware import GIB
from autofit.core.learning import OBJECTIVES, LearningCurve, best_learner, check_judging
from autofit.core.options import SearchOptions
from autofit.core.result import Result, SavedResult, tier
from autofit.core.workload import Hyperparameters, Workload
from autofit.models.config_json import is_hub_id
from autofit.probe import Executor
from autofit.report.learning import learning_lines
from autofit.training.loop import StepReport

SEEDS = (0, 1)
_MOST_STEPS, _MOST_SECONDS = 2**31, 1e6
_OVERHEAD = 600.0  # seconds to load weights and data, and to compile
_SOURCES = ("preset", "directory", "hub")  # of models that a file can be read for


class _TimeUpError(Exception):
    """Ends a training whose seconds are used up."""


@dataclass(frozen=True)
class Judge:
    """What finalists learn from, from which weights (None: random ones), for how many seconds with
    each of two seeds, and at which learning rate. `objective`: "loss-per-second" makes the config
    of the least loss the best one."""

    data: str | Path
    weights: str | Path | None = None
    seconds: float = 60.0
    lr: float = 1e-4
    objective: str = OBJECTIVES[0]
    trust_remote_code: bool = False
    allow_missing: bool = False  # start what the weights lack, such as a new head, from random numbers

    def __post_init__(self) -> None:
        check_judging("loss", self.objective, data=self.data)
        Hyperparameters(lr=self.lr)
        fine = isinstance(self.seconds, int | float) and 0 < self.seconds <= _MOST_SECONDS
        require(fine and not isinstance(self.seconds, bool), "the seconds of judging must be more than 0", self.seconds)
        check_readable(expanded(self.data, "data"), "the data file")
        if self.weights is not None and not (isinstance(self.weights, str) and is_hub_id(self.weights)):
            check_readable(expanded(self.weights, "weights"), "the directory")

    def check(self, workload: Workload, options: SearchOptions) -> None:
        """Raise an InputError where it cannot judge: a model that no file is read for, several
        devices, a cluster."""
        if workload.source.get("kind") not in _SOURCES:
            message = "only named models are trained on a file, which judging does."
            raise InputError(message, "Leave out the judge, and compare configs with autofit.fit(config=...).")
        if options.devices != 1 or options.nodes != 1 or options.executor != "local":
            raise InputError("configs are judged on one device of this machine.", "Leave out the judge.")

    def __call__(self, result: Result, executor: Executor, listener: Listener) -> Result:
        """The result with what its finalists learn. Ctrl-C ends it with what is known by then."""
        measured = {each.config: each for each in (result.best, *result.tiers.values(), *result.finalists) if each}
        curves = {config: LearningCurve(config) for config in measured}
        listener(PhaseStarted(f"training {len(curves)} finalists for {2 * self.seconds:.0f} s each"))
        try:
            for seed in SEEDS:
                for config in curves:
                    curves[config] = self._follow(curves[config], result, executor, seed)
        except KeyboardInterrupt:
            result = dataclasses.replace(result, stopped_by="interrupt")
        found = tuple(curves.values())
        start = "random weights" if self.weights is None else str(self.weights)
        head = f"From {start}, {self.seconds:g} s of training on {Path(self.data).name}"
        head += f" with each of {len(SEEDS)} seeds, at a learning rate of {self.lr:g}"
        for line in learning_lines(found, head):
            listener(Note(line))
            result = dataclasses.replace(result, notes=(*result.notes, line))
        first = best_learner(found)
        if self.objective == "loss-per-second" and first and result.best and first.config != result.best.config:
            chosen = measured[first.config]
            tiers = {**result.tiers, tier(chosen.config): chosen}
            result = dataclasses.replace(result, best=chosen, runner_up=result.best, tiers=tiers)
        return dataclasses.replace(result, learning=found)

    def _follow(self, curve: LearningCurve, result: Result, executor: Executor, seed: int) -> LearningCurve:
        if curve.reason:
            return curve
        hardware = {"device": result.hardware.device, "budget_gib": result.budget.device_bytes / GIB}
        saved = SavedResult(result.model, result.workload, result.source, hardware, curve.config, {})
        log, limit = f"judge-{seed}.log", 3 * self.seconds + _OVERHEAD
        try:
            steps = executor.run(_learn, None, saved, self, seed, log=log, timeout=limit, task="training a finalist")
        except AutofitError as error:
            return dataclasses.replace(curve, reason=error.message)
        return curve.with_run(*steps)


def _learn(_: None, saved: SavedResult, judge: Judge, seed: int) -> tuple[list[float], list[float]]:
    """The seconds and the loss of each step, in a process of its own."""
    reports: list[StepReport] = []

    def follow(report: StepReport) -> None:
        reports.append(report)
        if sum(each.seconds for each in reports[1:]) >= judge.seconds:
            raise _TimeUpError

    options: dict[str, Any] = {"lr": judge.lr, "steps": _MOST_STEPS, "trust_remote_code": judge.trust_remote_code}
    options["allow_missing"] = judge.allow_missing
    with suppress(_TimeUpError):
        train(saved, Path(judge.data), weights=judge.weights, seed=seed, callbacks=(follow,), **options)
    return [each.seconds for each in reports], [each.loss for each in reports]
