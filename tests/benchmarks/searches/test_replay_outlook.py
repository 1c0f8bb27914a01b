import json
from collections.abc import Callable

import pytest

from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.measurement import Outcome
from autofit.search.predictions import Predictions
from autofit.search.space import Space
from benchmarks.record_table import Row
from benchmarks.replay_outlook import judged, report, summary
from benchmarks.replay_samplers import Problem
from tests.tiny import CPU

SIZES = (1, 2, 4, 8, 16)
SPACE = Space("micro-batches", "", {"micro_batch_size": SIZES})


def _row(size: int) -> Row:
    """The larger the micro-batch, the faster; 100 bytes for each sample."""
    seconds = 1.0 + 1.0 / size
    step = {"median": seconds, "low": seconds, "high": seconds}
    probe = {"step_seconds": step, "build_seconds": 1.0, "warmup_seconds": 2.0, "seconds": 10.0}
    return Row(Config(micro_batch_size=size), Outcome.FITS, 100 * size, None, [probe])


def _problem(
    budget: int, seconds: Callable[[int], float], nbytes: Callable[[int], float]
) -> Problem:
    rows = {row.config: row for row in map(_row, SIZES)}
    expected = Predictions.of(list(rows), list(map(nbytes, SIZES)), list(map(seconds, SIZES)))
    return Problem(
        SPACE, Constraints(off={"micro_batch_size": 1}), expected, rows, budget, samples=16
    )


def test_good_predictions_are_right_about_everything() -> None:
    problem = _problem(410, lambda size: 3 * (1 + 1 / size), lambda size: 100.0 * size)
    found = summary(list(judged(problem, CPU, 0)))
    for row in found.values():
        assert row["fits"] == 1
        assert row["speed_off"] < 0.05
        assert row.get("regret", 0) == 0
        assert row.get("peak_off", 0) < 0.02
    assert {"half of it, measured", "half of it, predicted"} & found.keys()
    assert "twice as much, predicted" in found
    assert "twice as much, predicted: 1, as said whether it fits 100.0%, speed off" in report(found)


def test_wrong_predictions_are_told() -> None:
    problem = _problem(
        410,
        lambda size: 3.0 * (1 + size / 4),
        lambda size: 100.0 * size + (400 if size == 8 else 0),
    )
    rows = list(judged(problem, CPU, 0))
    assert any(row.get("regret", 0) > 0 or row.get("speed_off", 0) > 0.1 for row in rows)


def test_what_each_figure_is() -> None:
    rows = [
        {"of": "x", "fits": fits, "speed_off": off}
        for fits, off in ((True, 0.0), (False, 0.1), (True, 0.2))
    ]
    (row,) = summary(rows).values()
    assert row == pytest.approx({"count": 3, "fits": 2 / 3, "speed_off": 0.1, "speed_off_95": 0.19})
    assert json.loads(json.dumps(summary(rows))) == summary(rows)
