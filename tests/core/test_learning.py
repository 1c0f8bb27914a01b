"""Curves of loss against seconds, and which config learns most in the same time."""

import pytest

from autofit.core.config import Config
from autofit.core.learning import LearningCurve, best_learner

ONE, OTHER = Config({"precision": "fp32"}), Config({"precision": "bf16"})


def test_first_steps_count_as_long_as_others_and_points_are_few() -> None:
    curve = LearningCurve(ONE).with_run(
        [40.0, 9.0, *[1.0] * 198], [float(200 - step) for step in range(200)]
    )
    (run,), (steps,) = curve.runs, curve.steps
    assert (steps, len(run)) == (200, 50)
    assert run[-1] == (200.0, 2.5)  # seconds of 200 steps; the mean of 4, 3, 2 and 1
    assert curve.losses == (10.5,)  # of the last 20


def test_a_run_of_one_step() -> None:
    curve = LearningCurve(ONE).with_run([5.0], [3.0])
    assert (curve.runs, curve.losses) == ((((5.0, 3.0),),), (3.0,))


def test_the_least_mean_loss_of_those_that_were_trained_as_often() -> None:
    def learnt(config: Config, *losses: float) -> LearningCurve:
        curve = LearningCurve(config)
        for loss in losses:
            curve = curve.with_run([1.0], [loss])
        return curve

    one, other = learnt(ONE, 2.0, 4.0), learnt(OTHER, 2.9, 2.9)
    assert best_learner([one, other]) is other
    assert other.loss == pytest.approx(2.9)
    assert best_learner([one, learnt(OTHER, 1.0)]) is one  # the other ended after its first seed
    assert best_learner([LearningCurve(ONE, reason="memory ran out")]) is None
