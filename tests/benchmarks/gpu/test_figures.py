import pytest

from benchmarks.gpu import figures
from benchmarks.gpu.figures import Errors, Intervals
from tests.benchmarks.gpu.rows import case


def test_errors_are_without_sign_but_for_the_bias() -> None:
    errors = Errors.of([(110, 100), (95, 100), (100, 100), (None, 100), (100, None)])
    assert errors
    assert (errors.count, errors.bias) == (3, 0.0)
    assert [errors.median, errors.p90, errors.worst] == pytest.approx([0.05, 0.10, 0.10])
    assert Errors.of([(None, 1.0)]) is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.91, 10), (1.0, 10), (0.0, 1)])
def test_a_percentile_is_a_value_that_was_seen(share: float, value: int) -> None:
    assert figures.percentile(range(1, 11), share) == value


def test_intervals_count_hits_and_sides() -> None:
    seen = [case(device=size) for size in (94, 95, 100, 105, 106, 120)]
    found = Intervals.of([*seen, {**seen[0], "estimate": None}, case(outcome="out_of_memory")])
    assert found
    assert (found.count, found.hit, found.above, found.below) == (6, 0.5, 2, 1)
    assert found.width_worst == pytest.approx(10 / 94)
    assert Intervals.of([]) is None


def test_without_a_device_the_tensors_decide() -> None:
    found = Intervals.of([case(), case(low=101, high=111)])
    assert found
    assert (found.count, found.hit, found.above, found.below) == (2, 0.5, 0, 1)
    assert found.width_worst == pytest.approx(0.1)


def test_groups_are_of_rows_with_both_figures() -> None:
    rows = [
        case(),
        case(lever="compile", model="3B"),
        case(outcome="out_of_memory"),
        {**case(), "estimate": None},
    ]
    groups = figures.by_lever(rows)
    assert {name: len(each) for name, each in groups.items()} == {
        "all": 2,
        "lora": 2,
        "8B": 1,
        "3B": 1,
        "plain": 1,
        "compile": 1,
    }


def test_step_times_are_paired_and_ranked() -> None:
    rows = [
        case(step=step, speed=speed)
        for step, speed in ((1.0, 1000.0), (2.0, 250.0), (3.0, 200.0), (None, 10.0))
    ]
    pairs = figures.step_pairs(rows)
    assert pairs == [(1.0, 1.0), (2.0, 4.0), (3.0, 5.0)]
    assert figures.rank_correlation(pairs) == pytest.approx(1.0)
    assert figures.rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert figures.rank_correlation(pairs[:2]) is None
    assert figures.rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_utilisation_is_the_predicted_one_at_the_measured_time() -> None:
    assert figures.utilisation(case(step=10.0, speed=200.0)) == pytest.approx(0.5 * 10.0 / 5.0)
    assert figures.utilisation(case(step=None)) is None
    assert figures.utilisation(case(speed=None, outcome="failed")) is None
