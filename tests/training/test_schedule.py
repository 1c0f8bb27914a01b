"""The learning rate's course: warm-up, then the schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.workload import Hyperparameters
from autofit.training.schedule import learning_rate_factor


def test_warm_up_rises_in_a_line_to_the_whole() -> None:
    factor = learning_rate_factor(Hyperparameters(warmup_steps=4), 10)
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25, 0]), ("cosine", [1, 0.853553, 0.5, 0.146447, 0])],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    factor = learning_rate_factor(Hyperparameters(schedule=schedule), 4)
    assert [factor(step) for step in range(5)] == pytest.approx(expected, abs=1e-6)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
)
def test_the_factor_is_never_outside_its_range_and_falls_after_the_warm_up(
    schedule: str, warmup: int, total: int
) -> None:
    factor = learning_rate_factor(Hyperparameters(schedule=schedule, warmup_steps=warmup), total)
    course = [factor(step) for step in range(total)]
    assert all(0 < value <= 1 for value in course)  # every step that is taken learns something
    assert course[:warmup] == sorted(course[:warmup])
    assert course[warmup:] == sorted(course[warmup:], reverse=True)
