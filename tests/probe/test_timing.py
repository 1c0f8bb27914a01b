"""When a probe has seen enough steps, and what it may claim about their median."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.probe.timing import Plan, Stepper, interval_of_median, slowed_by, time_steps

FOREVER = Plan(min_steps=1, max_steps=1000, max_seconds=math.inf, tightness=-1.0)


def coverage(count: int, rank: int) -> float:
    """How probable it is that a median lies between the order statistics `rank` and `count - 1 - rank` (0-based).

    It does when at least rank + 1 of the samples fall below it, and as many above.
    """
    inside = sum(math.comb(count, below) for below in range(rank + 1, count - rank))
    return inside / 2**count


@given(st.integers(1, 200))
def test_interval_is_the_narrowest_symmetric_one_that_covers_95_percent(count: int) -> None:
    seen = interval_of_median([float(value) for value in range(count)])
    rank = int(seen.low)
    assert seen.high == count - 1 - rank
    if count < 6:
        assert rank == 0  # no pair of order statistics covers it
    else:
        assert coverage(count, rank) >= 0.95
    assert rank + 1 > (count - 1) // 2 or coverage(count, rank + 1) < 0.95


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40), st.randoms())
def test_interval_holds_the_median_whatever_the_order(
    samples: list[float], shuffler: object
) -> None:
    seen = interval_of_median(samples)
    assert min(samples) <= seen.low <= seen.median <= seen.high <= max(samples)
    mixed = list(samples)
    shuffler.shuffle(mixed)  # type: ignore[attr-defined]
    assert interval_of_median(mixed) == seen


class Clock:
    """Time that passes only in steps, whose lengths are given; the last one repeats."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self._seconds = list(seconds)

    def __call__(self) -> float:
        return self.now

    def step(self) -> float:
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        self.now += seconds
        return seconds


def timed(plan: Plan, *seconds: float) -> tuple[list[float], bool]:
    clock = Clock(*seconds)
    return time_steps(clock.step, plan, clock)


def test_stops_as_soon_as_the_median_is_tight_but_not_before_the_least_number() -> None:
    assert timed(Plan(min_steps=3, max_steps=20), 1.0) == ([1.0, 1.0, 1.0], False)
    assert timed(Plan(min_steps=7, max_steps=20, max_seconds=0.0), 1.0) == ([1.0] * 7, False)


def test_goes_on_while_steps_disagree() -> None:
    samples, _ = timed(Plan(min_steps=2, max_steps=20, max_seconds=math.inf), 1.0, 1.5, 1.0)
    seen, before = interval_of_median(samples), interval_of_median(samples[:-1])
    assert (seen.high - seen.low) / 2 <= 0.02 * seen.median
    assert (before.high - before.low) / 2 > 0.02 * before.median


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (Plan(max_steps=5, max_seconds=math.inf, tightness=-1), 5),
        (Plan(max_seconds=9.5, tightness=-1), 10),
    ],
    ids=["most steps", "most seconds"],
)
def test_never_passes_its_limits(plan: Plan, steps: int) -> None:
    assert timed(plan, 1.0) == ([1.0] * steps, False)


def test_two_steps_are_enough_where_time_is_over_and_neither_was_disturbed() -> None:
    plan = Plan(min_steps=2, max_steps=20, max_seconds=0.75)
    assert timed(plan, 0.4) == ([0.4, 0.4], False)
    assert timed(plan, 0.4, 0.5, 0.4) == ([0.4, 0.5, 0.4], False)
    assert timed(plan, 0.1) == ([0.1, 0.1, 0.1], False)  # there is time to see whether they agree


def test_gives_up_after_two_steps_that_are_hopelessly_slow() -> None:
    assert timed(Plan(best_seconds=0.4), 1.0, 0.9) == ([1.0, 0.9], True)


@pytest.mark.parametrize(
    "steps", [(1.0, 0.7), (0.7, 1.0)], ids=["second is not hopeless", "first is not hopeless"]
)
def test_one_slow_step_proves_nothing(steps: tuple[float, float]) -> None:
    samples, hopeless = timed(Plan(best_seconds=0.4, max_steps=4), *steps)
    assert len(samples) > 2
    assert not hopeless


def test_without_a_best_nothing_is_hopeless() -> None:
    assert timed(Plan(best_seconds=None, max_steps=3), 100.0)[1] is False


def test_a_step_that_raises_is_not_hidden() -> None:
    def broken() -> float:
        raise FloatingPointError

    clock: Callable[[], float] = Clock(1.0)
    with pytest.raises(FloatingPointError):
        time_steps(broken, FOREVER, clock)


def test_steps_that_only_become_slower_are_noticed() -> None:
    assert slowed_by([1.0, 1.01, 1.02, 1.04, 1.05, 1.06, 1.10, 1.11, 1.12]) == pytest.approx(
        1.11 / 1.01 - 1
    )


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],  # too few to tell
        [1.0, 1.2, 1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.1],  # one of the first was as slow
        [1.2, 1.2, 1.2, 1.1, 1.1, 1.1, 1.0, 1.0, 1.0],
    ],
)
def test_noise_and_what_becomes_faster_is_no_slowing_down(samples: list[float]) -> None:
    assert slowed_by(samples) == 0.0


def test_half_of_the_steps_are_enough_where_they_are_long() -> None:
    plan = Plan(min_steps=4, max_seconds=1.0, long_seconds=1.5)
    assert timed(plan, 1.4)[0] == [1.4] * 4
    assert timed(plan, 1.6)[0] == [1.6] * 2
    assert timed(plan, 1.6, 2.0, 1.7, 1.8)[0] == [1.6, 2.0, 1.7], "one of two was disturbed"
    assert timed(replace(plan, min_steps=2), 1.6)[0] == [1.6]
    assert timed(replace(plan, min_steps=3), 1.6)[0] == [1.6] * 2


LONG = Plan(min_steps=4, max_seconds=1.0, compose=False, long_seconds=1.5)


@pytest.mark.parametrize(
    ("plan", "whole", "by_parts", "ran"),
    [
        (Plan(), 5.0, 5.1, ["parts"] * 4),
        (replace(LONG, long_seconds=math.inf), 5.0, 5.1, ["whole"] * 4),
        (LONG, 1.0, 1.1, ["whole"] * 4),  # steps are short
        (LONG, 5.0, 5.1, ["whole", *["parts"] * 3]),
        (LONG, 5.0, None, ["whole"] * 4),  # of few micro-batches
        # parts that do not add up to a step are of no use
        (LONG, 5.0, 6.0, ["whole", "parts", *["whole"] * 3]),
    ],
)
def test_parts_stand_for_a_long_step_once_they_add_up_to_a_whole_one(
    plan: Plan, whole: float, by_parts: float | None, ran: list[str]
) -> None:
    seen: list[str] = []

    def step() -> float:
        seen.append("whole")
        return whole

    def parts() -> float:
        seen.append("parts")
        return by_parts or 0.0

    stepper = Stepper(plan, step, parts if by_parts else None)
    samples = [stepper() for _ in range(4)]
    assert seen == ran
    assert stepper.composed == (by_parts in samples)
    if by_parts != 6.0:  # which stands for no step
        assert samples == [whole if name == "whole" else by_parts for name in ran]
    else:
        assert samples == [whole] * 4
