"""The time of a sharded step, whose collectives hide behind its computation where they can."""

import numpy as np
import pytest

from autofit.estimate import overlap
from autofit.estimate.overlap import Unit, beside, micro_batch, one_after_another


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_SLOWED", 0.0)


def test_without_collectives_it_takes_as_long_as_it_computes() -> None:
    assert micro_batch([Unit(1.0, 2.0)] * 3) == pytest.approx(9.0)


def test_only_the_first_gathering_and_the_last_reduction_are_waited_for_where_blocks_compute_longer() -> None:
    units = [Unit(1.0, 2.0, gather=0.5, again=0.5, reduce=0.25)] * 4
    # the last group is gathered again before its backward can begin, too
    assert micro_batch(units) == pytest.approx(0.5 + 4 * 1.0 + 0.5 + 4 * 2.0 + 0.25)
    assert micro_batch(units, reduced=False) == pytest.approx(0.5 + 4 * 1.0 + 0.5 + 4 * 2.0)


def test_a_slow_link_is_what_is_waited_for() -> None:
    units = [Unit(0.1, 0.2, gather=3.0, again=3.0, reduce=5.0)] * 4
    assert micro_batch(units) == pytest.approx(4 * 3.0 + 0.1 + 4 * 3.0 + 4 * 5.0, rel=0.02)


def test_a_reduction_queues_behind_the_gathering_that_was_issued_before_it() -> None:
    first, last = Unit(1.0, 1.0, again=2.0, reduce=1.0), Unit(1.0, 1.0, reduce=1.0)
    # backward of the last one from 2 to 3; the first is gathered from 2 to 4, the last reduced from 4 to 5, the first
    # computes from 4 to 5 and is reduced from 5 to 6
    assert micro_batch([first, last]) == pytest.approx(6.0)


def test_collectives_slow_down_what_runs_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = micro_batch([Unit(1.0, 2.0, gather=0.5)] * 4)
    monkeypatch.setattr(overlap, "_SLOWED", 0.2)
    assert plain < micro_batch([Unit(1.0, 2.0, gather=0.5)] * 4) < 1.2 * plain


def test_many_sizes_are_told_at_once() -> None:
    sizes = np.array([0.1, 1.0, 10.0])
    together = micro_batch([Unit(sizes, 2 * sizes, gather=0.5, again=0.5, reduce=1.0)] * 3)
    alone = [micro_batch([Unit(size, 2 * size, gather=0.5, again=0.5, reduce=1.0)] * 3) for size in sizes.tolist()]
    assert together.tolist() == pytest.approx(alone)


def test_on_cpus_one_waits_for_the_other() -> None:
    units = [Unit(1.0, 2.0, gather=0.5, again=0.5, reduce=1.0)] * 3
    assert one_after_another(units) == pytest.approx(15.0)
    assert beside(3.0, 2.0, asynchronous=False) == 5.0
