"""What configs learn: the losses that finalists reach in the same seconds on the user's own
data."""

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
    """A config's training: of each seed the points (seconds, mean loss of the steps since the point
    before), the mean loss of the last tenth of its steps, and their number. `reason`: why it could
    not be trained so."""

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
        """The same with one more seed, from the seconds and the loss of each step. The first steps,
        which also make state and compile, count as long as the others."""
        usual = median(seconds[_WARMING:] or seconds)
        taken = [min(each, usual) if step < _WARMING else each for step, each in enumerate(seconds)]
        size, last = -(-len(losses) // _POINTS), max(1, len(losses) // 10)
        ends = [*range(size, len(losses), size), len(losses)]
        run = tuple((sum(taken[:end]), fmean(losses[max(0, end - size) : end])) for end in ends)
        return LearningCurve(
            self.config, (*self.runs, run), (*self.losses, fmean(losses[-last:])), (*self.steps, len(losses))
        )


def best_learner(curves: Sequence[LearningCurve]) -> LearningCurve | None:
    """The one of the least mean loss, of those that were trained with as many seeds as any."""
    seeds = max((len(each.losses) for each in curves), default=0)
    return min((each for each in curves if each.losses and len(each.losses) == seeds), key=_loss, default=None)


def _loss(curve: LearningCurve) -> float:
    return curve.loss


def check_judging(judge: str | None, objective: str, **given: object) -> None:
    """Raise an InputError for a judge or an objective that does not exist, or for what belongs to a
    judge without one; `given`: options of judging, None where they were left out."""
    if judge is not None and judge not in JUDGES:
        raise unknown("judge", judge, JUDGES)
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if judge is None and given.get("weights") is not None and given.get("data") is None:
        raise InputError("--weights has the tokenizer of --data, which is not given.", "Add --data FILE.")
    alone = [name for name, value in given.items() if value is not None and name not in ("data", "weights")]
    alone += ["objective"] * (objective != OBJECTIVES[0])
    if judge is None and alone:
        raise InputError(f"--{alone[0].replace('_', '-')} is for judging what configs learn.", "Add --judge loss.")
    if judge is not None and given.get("data") is None:
        raise InputError("to judge what configs learn, data to learn from is needed.", "Add --data FILE.")
