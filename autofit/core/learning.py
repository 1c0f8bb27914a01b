"""What configs learn: the losses that finalists reach in equal time on the user's own data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from autofit.core.config import Config
from autofit.core.errors import InputError, unknown
from autofit.core.plain import Loss

JUDGES = ("loss",)
OBJECTIVES = ("throughput", "loss-per-second")
_POINTS = 50  # of a curve
_WARMING = 2  # steps that make state, and compile
Run = tuple[tuple[float, Loss], ...]


@dataclass(frozen=True)
class LearningCurve:
    """A config's training.

    Attributes:
        runs: of each seed the points (seconds, mean loss of the last few steps).
        losses: of each seed the mean loss of the last tenth of its steps.
        steps: of each seed their number.
        reason: why it could not be trained so.
    """

    config: Config
    runs: tuple[Run, ...] = ()
    losses: tuple[Loss, ...] = ()
    steps: tuple[int, ...] = ()
    reason: str | None = None

    @property
    def loss(self) -> float:
        """The mean over the seeds."""
        return fmean(self.losses)

    def with_run(self, seconds: Sequence[float], losses: Sequence[float]) -> "LearningCurve":
        """The same with one more seed, from the seconds and the loss of each step.

        The first steps, which also make state and compile, count as long as the others.
        """
        usual = median(seconds[_WARMING:] or seconds)
        first = [min(time, usual) for time in seconds[:_WARMING]]
        taken = [*first, *seconds[_WARMING:]]

        count = len(losses)
        size = math.ceil(count / _POINTS)
        run = []
        for end in (*range(size, count, size), count):
            loss = fmean(losses[max(0, end - size) : end])
            run.append((sum(taken[:end]), loss))

        last = max(1, count // 10)
        return LearningCurve(
            self.config,
            runs=(*self.runs, tuple(run)),
            losses=(*self.losses, fmean(losses[-last:])),
            steps=(*self.steps, count),
        )


def best_learner(curves: Sequence[LearningCurve]) -> LearningCurve | None:
    """The one of the least mean loss, of those that were trained with as many seeds as any."""
    seeds = max((len(curve.losses) for curve in curves), default=0)
    complete = [curve for curve in curves if curve.losses and len(curve.losses) == seeds]
    return min(complete, key=lambda curve: curve.loss, default=None)


def check_judging(judge: str | None, objective: str, **given: object) -> None:
    """Raise an InputError for an unknown judge or objective, or for what lacks a judge or data.

    `given`: options of judging, None where they were left out.
    """
    if judge is not None and judge not in JUDGES:
        raise unknown("judge", judge, JUDGES)
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)

    data = given.pop("data", None)
    if judge is not None:
        if data is None:
            message = "to judge what configs learn, data to learn from is needed."
            raise InputError(message, "Add --data FILE.")
        return

    if given.pop("weights", None) is not None and data is None:
        message = "--weights has the tokenizer of --data, which is not given."
        raise InputError(message, "Add --data FILE.")
    alone = [name for name, value in given.items() if value is not None]
    if objective != OBJECTIVES[0]:
        alone.append("objective")
    if alone:
        option = alone[0].replace("_", "-")
        raise InputError(f"--{option} is for judging what configs learn.", "Add --judge loss.")
