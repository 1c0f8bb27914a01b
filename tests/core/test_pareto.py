"""The frontier, on random points: nothing on it is dominated, and nothing that is not on it should be."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.measurement import Outcome
from autofit.core.pareto import (
    MOST_POINTS,
    Alternative,
    OtherBudget,
    Point,
    fastest_within,
    frontier,
    thinned,
)
from autofit.core.plain import to_plain


def point(peak: int, rate: float, measured: bool = True, **knobs: object) -> Point:
    return Point(Config(knobs or {"peak": peak, "rate": rate}), peak, rate, rate * 64, measured)


# Few different values, so that ties are common.
POINTS = st.lists(
    st.builds(point, st.integers(1, 12), st.integers(1, 12).map(float), st.booleans()), max_size=40
)
TOLERANCES = st.sampled_from([0.0, 0.03, 0.5])


def dominates(one: Point, other: Point) -> bool:
    """As little memory and as much throughput, and more of one."""
    figures = (
        (one.peak_bytes, -one.samples_per_second),
        (other.peak_bytes, -other.samples_per_second),
    )
    return (
        all(mine <= theirs for mine, theirs in zip(*figures, strict=True))
        and figures[0] != figures[1]
    )


@given(POINTS, TOLERANCES)
def test_from_point_to_point_there_is_more_of_both(points: list[Point], tolerance: float) -> None:
    found = frontier(points, tolerance=tolerance)
    assert [each.peak_bytes for each in found] == sorted({each.peak_bytes for each in found})
    assert [each.samples_per_second for each in found] == sorted(
        {each.samples_per_second for each in found}
    )
    assert not any(dominates(one, other) for one in found for other in found)
    assert set(found) <= set(points)


@given(POINTS, TOLERANCES)
def test_what_was_measured_is_on_it_or_no_better_than_something_on_it(
    points: list[Point], tolerance: float
) -> None:
    found = frontier(points, tolerance=tolerance)
    for each in points:
        if each.measured:
            assert any(not dominates(each, other) and _as_good(other, each) for other in found)


def _as_good(one: Point, other: Point) -> bool:
    return one.peak_bytes <= other.peak_bytes and one.samples_per_second >= other.samples_per_second


@given(POINTS)
def test_a_guess_is_left_out_only_where_something_is_as_good_but_for_the_tolerance(
    points: list[Point],
) -> None:
    tolerance = 0.1
    found = frontier(points, tolerance=tolerance)
    facts = [each for each in points if each.measured]
    for each in points:
        as_good = any(_as_good(other, each) for other in found)
        roughly = any(
            fact.peak_bytes <= each.peak_bytes * (1 + tolerance)
            and fact.samples_per_second * (1 + tolerance) >= each.samples_per_second
            for fact in facts
        )
        assert as_good or (not each.measured and roughly)


@given(POINTS, st.integers(0, 13))
def test_the_fastest_within_a_size(points: list[Point], limit: int) -> None:
    found = fastest_within(frontier(points), limit)
    rates = [each.samples_per_second for each in points if each.peak_bytes <= limit]
    assert (found and found.samples_per_second) == max(rates, default=None)
    assert found is None or found.peak_bytes <= limit


@given(st.integers(0, 60), st.integers(2, 30), st.sets(st.integers(0, 59)))
def test_thinning_keeps_the_ends_and_the_given_points(
    count: int, most: int, indices: set[int]
) -> None:
    points = [point(size, float(size**2 + 1), measured=size % 3 == 0) for size in range(count)]
    keep = [points[index] for index in indices if index < count]
    left = thinned(points, keep, most)
    assert left == tuple(each for each in points if each in left)
    assert len(left) <= max(most, len(keep) + 2)
    assert len(left) == count or len(left) >= most
    assert set(keep) | {*points[:1], *points[-1:]} <= set(left)


def test_thinning_drops_guesses_first_and_what_gains_the_least() -> None:
    points = [
        point(1, 10.0),
        point(2, 10.1),
        point(3, 20.0, False),
        point(4, 20.1, False),
        point(5, 40.0),
    ]
    assert [each.peak_bytes for each in thinned(points, most=4)] == [1, 2, 3, 5]
    assert [each.peak_bytes for each in thinned(points, most=3)] == [1, 2, 5]
    assert [each.peak_bytes for each in thinned(points, most=2)] == [1, 5]
    assert MOST_POINTS == 20


def test_a_guess_no_better_than_a_fact_by_the_tolerance_does_not_take_its_place() -> None:
    fact = point(100, 10.0)
    assert frontier([fact, point(98, 10.2, False)], tolerance=0.03) == (fact,)
    less = point(90, 10.0, False)
    assert frontier([fact, less], tolerance=0.03) == (less,)
    faster = point(100, 10.5, False)
    assert frontier([fact, faster], tolerance=0.03) == (faster,)


def test_of_equals_the_measured_one_stays() -> None:
    guess, fact = point(5, 5.0, False), point(5, 5.0)
    assert frontier([guess, fact]) == (fact,)


def test_as_data() -> None:
    assert to_plain(point(5, 2.0, precision="bf16")) == {
        "config": {"precision": "bf16"},
        "peak_bytes": 5,
        "samples_per_second": 2.0,
        "tokens_per_second": 128.0,
        "measured": True,
    }
    other = Alternative(
        "precision", Config(precision="fp32"), Outcome.FITS, 7, 1.5, None, measured=False
    )
    assert other.to_dict() == {
        "knob": "precision",
        "value": "fp32",
        "outcome": "fits",
        "peak_bytes": 7,
        "samples_per_second": 1.5,
        "tokens_per_second": None,
        "measured": False,
    }
    assert other.fits
    assert not dataclasses.replace(other, outcome=Outcome.OUT_OF_MEMORY).fits


def test_another_budget_is_data() -> None:
    assert to_plain(OtherBudget("twice as much", 2)) == {
        "why": "twice as much",
        "device_bytes": 2,
        "card": None,
    }
