"""What an earlier measurement says now: of memory within another budget, of speed beside others of its day."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.search.encoding import Encoding
from autofit.search.prior_measurements import (
    _MOST_TIMED,
    PriorMeasurement,
    PriorMeasurements,
    prior_measurement,
)
from tests.search.proofs import rules_out

CONFIG = Config(micro_batch_size=4)
SIZES = st.integers(1, 100)


def probed(needs: int, cap: int, *, near_miss: float = 1.5) -> Measurement:
    """What a probe on a CPU sees of a run that takes so much: one far over budget is stopped before it ends."""
    if needs <= cap:
        steps = StepSeconds(2.0, 1.9, 2.1)
        return Measurement(
            CONFIG,
            Outcome.FITS,
            step_seconds=steps,
            peak_bytes=PeakBytes(needs),
            warmup_seconds=1.0,
        )
    ended = needs <= cap * near_miss
    peak = PeakBytes(needs if ended else math.ceil(cap * near_miss))
    return Measurement(
        CONFIG, Outcome.OUT_OF_MEMORY, peak_bytes=peak, warmup_seconds=1.0 if ended else 0.0
    )


@given(SIZES, SIZES, SIZES)
def test_on_a_cpu_another_budget_is_answered_rightly_or_not_at_all(
    needs: int, then: int, now: int
) -> None:
    known = prior_measurement(probed(needs, then), 1, then=then, now=now, exact=True)
    if known is None:
        assert needs > then  # it was stopped before it told how much it needs,
        assert now > then  # which may fit what there is now
        return
    assert known.outgrew == known.proven == (needs > now)
    assert known.peak_bytes in (needs, None)
    assert (known.step_seconds is not None) == (needs <= then)
    assert known.works


@given(SIZES, SIZES)
def test_the_same_budget_is_always_answered(needs: int, cap: int) -> None:
    assert prior_measurement(probed(needs, cap), 1, then=cap, now=cap, exact=True) is not None


@given(SIZES, SIZES, SIZES)
def test_on_other_devices_nothing_is_proven(needs: int, then: int, now: int) -> None:
    known = prior_measurement(probed(needs, then), 1, then=then, now=now, exact=False)
    assert known is None or not known.proven


def test_what_the_limit_of_the_machine_stopped_is_no_proof() -> None:
    stopped = Measurement(CONFIG, Outcome.OUT_OF_MEMORY, peak_bytes=PeakBytes(5))
    assert prior_measurement(stopped, 1, then=10, now=10, exact=True) == PriorMeasurement(
        CONFIG, outgrew=True
    )
    assert prior_measurement(stopped, 1, then=10, now=3, exact=True) == PriorMeasurement(
        CONFIG, outgrew=True, proven=True
    )
    assert prior_measurement(stopped, 1, then=10, now=11, exact=True) is None


def test_a_card_may_run_short_of_memory_below_its_peak() -> None:
    """The allocator's cache counts, too: what did not fit then will hardly fit now."""
    missed = Measurement(
        CONFIG, Outcome.OUT_OF_MEMORY, peak_bytes=PeakBytes(9, 12), warmup_seconds=1.0
    )
    found = [prior_measurement(missed, 1, then=10, now=now, exact=False) for now in (8, 10, 11)]
    assert [each and (each.outgrew, each.peak_bytes) for each in found] == [
        (True, 9),
        (True, 9),
        (False, 9),
    ]


@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.DIVERGED, Outcome.REFUSED, Outcome.TIMED_OUT]
)
def test_what_did_not_work_is_known_not_to(outcome: Outcome) -> None:
    assert prior_measurement(
        Measurement(CONFIG, outcome), 3, then=1, now=2, exact=True
    ) == PriorMeasurement(CONFIG, 3, works=False)


def test_what_the_host_had_free_on_that_day_says_nothing() -> None:
    assert (
        prior_measurement(
            Measurement(CONFIG, Outcome.HOST_OUT_OF_MEMORY), 1, then=1, now=1, exact=False
        )
        is None
    )


# All of it, as surrogate need it


def at(size: int, seconds: float = 1.0, **more: Any) -> PriorMeasurement:
    return PriorMeasurement(Config(micro_batch_size=size), step_seconds=seconds, **more)


def test_one_search_s_measurements_of_a_config_are_one_speed() -> None:
    past = PriorMeasurements([at(1, 1.0), at(1, 4.0), at(1, 3.0, session=2)])
    np.testing.assert_allclose(past.speeds, -np.log([2.0, 3.0]))
    several, single = np.diag(past.noise(0, 0.5)).tolist()
    assert several == pytest.approx(single - 0.5**2 / 2)


def test_speeds_of_one_day_err_together_and_today_s_alone() -> None:
    past = PriorMeasurements([at(1, 1.0), at(2, 2.0), at(4, 3.0, session=2)])
    noise = past.noise(2, 0.04)
    np.testing.assert_allclose(noise, noise.T)
    assert noise[0, 0] == noise[1, 1] == pytest.approx(0.04**2)
    assert noise[0, 1:].tolist() == [0, 0, 0, 0]
    assert noise[2, 3] > noise[2, 4] == noise[3, 4] == 0
    assert np.linalg.eigvalsh(noise).min() > 0


def test_the_fastest_that_fit_are_reckoned_with() -> None:
    slow = [at(size, 10.0 + size) for size in range(1, _MOST_TIMED)]
    past = PriorMeasurements(
        [*slow, at(1000, 5.0), at(2000, 1.0, outgrew=True), at(3000, 6.0), at(4000, 100.0)]
    )
    kept = [config["micro_batch_size"] for config in past.configs]
    assert len(kept) == _MOST_TIMED
    assert kept[:2] == [1000, 3000]
    assert not {2000, 4000} & set(kept)


def test_memory_is_known_where_a_run_came_to_its_peak() -> None:
    past = PriorMeasurements(
        [
            at(1, peak_bytes=5),
            at(2, outgrew=True),
            at(3, outgrew=True, peak_bytes=9),
            at(4, works=False),
        ]
    )
    assert past.sizes == {Config(micro_batch_size=1): 5, Config(micro_batch_size=3): 9}
    assert past.outgrew == [Config(micro_batch_size=2)]
    assert past.fits == {Config(micro_batch_size=1)}
    assert list(past.works.values()) == [True, True, True, False]


def order(knob: str, value: object) -> int | None:
    return int(str(value)) if knob == "micro_batch_size" else None


@given(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 8)))
def test_only_what_is_proven_excludes(proven: set[int], believed: set[int]) -> None:
    pool = [Config(micro_batch_size=size, gradient_accumulation_steps=2) for size in range(1, 9)]
    known = [
        PriorMeasurement(pool[size - 1], peak_bytes=size, outgrew=True, proven=True)
        for size in proven
    ]
    known += [PriorMeasurement(pool[size - 1], outgrew=True) for size in believed]
    left = PriorMeasurements(known).not_outgrown(Encoding(pool), order)
    missed = [pool[size - 1] for size in proven]
    assert left.tolist() == [
        not any(rules_out(miss, config, order) for miss in missed) for config in pool
    ]


def test_nothing_known_is_nothing() -> None:
    past = PriorMeasurements()
    assert past.speeds.shape == (0,)
    np.testing.assert_allclose(past.noise(2, 0.1), np.eye(2) * 0.01)
    assert past.not_outgrown(Encoding([CONFIG]), order).tolist() == [True]
