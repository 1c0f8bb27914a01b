from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, StepSeconds
from autofit.search.drift import AGAIN_AFTER_PROBES, as_now, is_due, slowdown
from autofit.search.study import Limits, search

NOISE = 0.04


def timed(name: str, seconds: float, *, cost: float = 60.0) -> Measurement:
    return Measurement(
        Config(optimizer=name),
        Outcome.FITS,
        step_seconds=StepSeconds(seconds, 0.9 * seconds, 1.1 * seconds),
        samples_per_second=8 / seconds,
        seconds=cost,
    )


def missed(name: str) -> Measurement:
    return Measurement(Config(optimizer=name), Outcome.OUT_OF_MEMORY, seconds=60.0)


def ramp(
    slower: float, *, noise: float = 0.0, count: int = 33, every: int = 8
) -> list[Measurement]:
    """All take a second at first, and so much longer in the end; one in so many is the same config again."""
    draw = random.Random(1)
    names = ["again" if place % every == 0 else f"other-{place}" for place in range(count)]
    times = [
        (1 + slower * place / (count - 1)) * math.exp(draw.gauss(0, noise))
        for place in range(count)
    ]
    return [timed(name, seconds) for name, seconds in zip(names, times, strict=True)]


def test_what_took_much_longer_than_a_later_one_of_the_same_config_was_disturbed() -> None:
    names_and_seconds = [("a", 1.5), ("b", 1.1), ("a", 1.0), ("b", 1.2), ("b", 1.4)]
    measured = [timed(name, seconds, cost=1.0) for name, seconds in names_and_seconds]
    seen = [each.step_seconds.median for each in as_now(measured, noise=NOISE) if each.step_seconds]
    # The first of b was no slower than later ones, however much slower those are.
    assert seen == pytest.approx([1.1, 1.0, 1.2, 1.4], rel=0.02)


times = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0.5, 2.0), st.floats(0.0, 600.0)),
    min_size=1,
    max_size=12,
)


@given(times, st.floats(0.1, 10.0))
def test_it_is_told_of_the_last_measurement_and_a_matter_of_ratios(
    given: Any, scale: float
) -> None:
    here = slowdown([timed(name, seconds, cost=cost) for name, seconds, cost in given], noise=NOISE)
    there = slowdown(
        [timed(name, scale * seconds, cost=cost) for name, seconds, cost in given], noise=NOISE
    )
    assert here[-1] == 0
    np.testing.assert_allclose(here, there, atol=1e-6)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=10))
def test_nothing_is_told_by_configs_measured_once(given: list[float]) -> None:
    once = [timed(str(place), seconds) for place, seconds in enumerate(given)]
    assert not slowdown(once, noise=NOISE).any()
    assert as_now(once, noise=NOISE) == once


def test_a_machine_that_slows_down_is_seen_and_taken_out() -> None:
    measured = ramp(0.3, noise=0.01)
    told = slowdown(measured, noise=NOISE)
    assert -math.log(1.3) < told[0] < -0.1
    assert np.all(np.diff(told) > -0.02)
    now = [each.step_seconds.median for each in as_now(measured, noise=NOISE) if each.step_seconds]
    assert max(now) / min(now) < 1.15
    assert now[-1] == measured[-1].step_seconds.median  # type: ignore[union-attr]


def test_a_steady_but_noisy_machine_is_left_alone() -> None:
    assert abs(slowdown(ramp(0.0, noise=NOISE), noise=NOISE)).max() < 0.03


def test_what_did_not_fit_stays_as_it_is_and_tells_nothing() -> None:
    measured = [timed("a", 1.0), missed("b"), timed("a", 2.0)]
    now = as_now(measured, noise=NOISE)
    assert now[1] == measured[1]
    assert now[0].throughput < measured[0].throughput
    assert not slowdown([missed("a"), missed("a")], noise=NOISE).any()


def test_something_is_due_again_after_a_while_of_probes_and_of_time() -> None:
    enough = [timed(str(place), 1.0) for place in range(AGAIN_AFTER_PROBES + 1)]
    assert is_due(enough)
    assert not is_due(enough[:-1])
    assert not is_due([timed(str(place), 1.0, cost=2.0) for place in range(40)])
    assert not is_due([missed(str(place)) for place in range(40)])
    assert not is_due([*enough, timed("3", 1.0)])
    assert not is_due([])


def test_a_search_on_a_machine_that_slows_down_measures_its_leader_again(formula: Any) -> None:
    problem = formula(3)
    asked, honest = problem.problem(), problem.probe

    def slowing(number: int, config: Config, best: float | None) -> Measurement:
        seen = honest(number, config)
        if not seen.fits:
            return Measurement(**{**vars(seen), "seconds": 60.0})
        return Measurement(
            **{**vars(seen.taking(seen.step_seconds.median * 1.01**number)), "seconds": 60.0}
        )

    found = search(
        problem.space, type(asked)(**{**vars(asked), "probe": slowing}), limits=Limits(trials=40)
    )
    again = len(problem.probed) - len(set(problem.probed))
    assert 3 <= again <= 40 // AGAIN_AFTER_PROBES
    assert 0.1 < found.slowdown < 0.5
    # as measured, not as corrected
    assert all(best in found.measurements for _, best in problem.finished if best)
