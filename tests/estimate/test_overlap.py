"""The time of a sharded step, whose collectives hide behind its computation where they can."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.estimate import overlap
from autofit.estimate.overlap import Runs, Unit, micro_batch, one_after_another


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_SLOWED", 0.0)


def of_equals(forward: Unit, backward: Unit, times: int) -> tuple[Runs, Runs]:
    return [([forward], times)], [([backward], times)]


def test_without_collectives_it_takes_as_long_as_it_computes() -> None:
    assert micro_batch(*of_equals(Unit(1.0), Unit(2.0), 3)) == pytest.approx(9.0)


def test_only_the_first_gathering_and_the_last_reduction_are_waited_for_where_blocks_compute_longer() -> (
    None
):
    forward, backward = Unit(1.0, gather=0.5), Unit(2.0, gather=0.5, reduce=0.25)
    # the last group is gathered again before its backward can begin, too
    assert micro_batch(*of_equals(forward, backward, 4)) == pytest.approx(
        0.5 + 4 * 1.0 + 0.5 + 4 * 2.0 + 0.25
    )


def test_a_slow_link_is_what_is_waited_for() -> None:
    forward, backward = Unit(0.1, gather=3.0), Unit(0.2, gather=3.0, reduce=5.0)
    expected = 4 * 3.0 + 0.1 + 4 * 3.0 + 4 * 5.0
    assert micro_batch(*of_equals(forward, backward, 4)) == pytest.approx(expected, rel=0.02)


def test_a_reduction_queues_behind_the_gathering_that_was_issued_before_it() -> None:
    forward = [([Unit(1.0), Unit(1.0)], 1)]
    backward = [([Unit(1.0, reduce=1.0), Unit(1.0, gather=2.0, reduce=1.0)], 1)]
    # backward of the last one from 2 to 3; the first is gathered from 2 to 4, the last reduced from 4 to 5, the first
    # computes from 4 to 5 and is reduced from 5 to 6
    assert micro_batch(forward, backward) == pytest.approx(6.0)


def test_collectives_slow_down_what_runs_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    both = of_equals(Unit(1.0, gather=0.5), Unit(2.0), 4)
    plain = micro_batch(*both)
    monkeypatch.setattr(overlap, "_SLOWED", 0.2)
    assert plain < micro_batch(*both) < 1.2 * plain


SECONDS = st.floats(0.0, 10.0)
UNITS = st.lists(st.builds(Unit, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=3)


@given(UNITS, UNITS, UNITS, st.integers(1, 60))
def test_many_rounds_are_told_from_the_first_ones(
    first: Sequence[Unit], forward: Sequence[Unit], backward: Sequence[Unit], times: int
) -> None:
    at_once = micro_batch([(first, 1), (forward, times)], [(backward, times), (first, 1)])
    one_by_one = micro_batch(
        [(first, 1), *[(forward, 1)] * times], [*[(backward, 1)] * times, (first, 1)]
    )
    assert at_once == pytest.approx(one_by_one)


def test_many_sizes_are_told_at_once() -> None:
    def of(size: object) -> tuple[Runs, Runs]:
        return of_equals(Unit(size, gather=0.5), Unit(2 * size, gather=0.5, reduce=1.0), 3)  # type: ignore[operator]

    sizes = np.array([0.1, 1.0, 10.0])
    assert micro_batch(*of(sizes)).tolist() == pytest.approx(
        [micro_batch(*of(size)) for size in sizes.tolist()]
    )


def test_on_cpus_one_waits_for_the_other() -> None:
    assert (
        one_after_another(*of_equals(Unit(1.0, gather=0.5), Unit(2.0, gather=0.5, reduce=1.0), 3))
        == 15.0
    )
