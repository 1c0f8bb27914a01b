from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.search import verification
from autofit.search.ranking import Ranking
from autofit.search.verification import Verification, confirm, verify


def at(name: str, rate: float, *, peak: int = 10) -> Measurement:
    seconds = 8 / rate if rate else 0.0
    return Measurement(
        Config(optimizer=name),
        Outcome.FITS if rate else Outcome.OUT_OF_MEMORY,
        step_seconds=StepSeconds(seconds, 0.9 * seconds, 1.1 * seconds) if rate else None,
        samples_per_second=rate or None,
        peak_bytes=PeakBytes(peak),
        seconds=3.0,
        steps=5,
    )


class Rerun:
    """Rates by name when measured again, one after the other; 0 is out of memory."""

    def __init__(self, rates: Mapping[str, list[float]]) -> None:
        self.rates = {name: list(each) for name, each in rates.items()}
        self.asked: list[str] = []

    def __call__(self, finalist: Measurement) -> Measurement:
        name = str(finalist.config["optimizer"])
        self.asked.append(name)
        return at(name, self.rates[name].pop(0), peak=10 + len(self.asked))


Played = Callable[..., tuple[Verification, Rerun]]


@pytest.fixture
def played() -> Played:
    def run(
        expected: dict[str, float],
        again: dict[str, list[float]],
        tolerance: float = 0.03,
        **others: Any,
    ) -> tuple[Verification, Rerun]:
        rerun = Rerun(again)
        those = [at(name, rate) for name, rate in expected.items()]
        return verify(those, those, rerun, Ranking(tolerance, lambda config: ()), **others), rerun

    return run


def test_all_that_may_be_the_best_are_measured_in_turn(played: Played) -> None:
    found, rerun = played(
        {"a": 10, "b": 9.6, "c": 9.4, "d": 5}, {name: [9.0, 9.0] for name in "abcd"}
    )
    assert rerun.asked == ["a", "b", "a", "c", "b", "c"]  # the likeliest answer is verified first
    assert [each.config["optimizer"] for each in found.verified] == ["a", "b", "c"]
    assert all(each.verified for each in found.verified)


def test_a_runner_up_is_measured_however_slow(played: Played) -> None:
    assert played({"a": 10, "b": 2, "c": 1}, {name: [8.0, 8.0] for name in "abc"})[1].asked == [
        "a",
        "b",
        "a",
        "b",
    ]


def test_the_wider_the_tolerance_the_wider_the_field(played: Played) -> None:
    again = {name: [10.0, 10.0] for name in "abc"}
    assert "c" not in played({"a": 10, "b": 9.9, "c": 9}, again, tolerance=0.03)[1].asked
    assert "c" in played({"a": 10, "b": 9.9, "c": 9}, again, tolerance=0.08)[1].asked


def test_who_fails_is_not_tried_again_and_gives_way(played: Played) -> None:
    found, rerun = played({"a": 10, "b": 8, "c": 7}, {"a": [0.0], "b": [8.0, 8.0], "c": [7.0, 7.0]})
    assert rerun.asked == ["a", "b", "b", "c", "c"]
    assert found.failed == (Config(optimizer="a"),)
    assert {each.config["optimizer"] for each in found.latest()} == {"b", "c"}


def test_one_expected_to_beat_all_that_was_verified_is_called_up_until_there_are_enough(
    played: Played,
) -> None:
    names = "abcdefgh"
    found, rerun = played(
        {name: 20.0 - place for place, name in enumerate(names)},
        {name: [1.0, 1.0] for name in names},
    )
    assert len(found.verified) == verification.MOST
    assert rerun.asked[-2:] == ["e", "e"]


def test_a_machine_that_slowed_down_calls_up_no_others(played: Played) -> None:
    expected = {"a": 10.0, "b": 9.9, "c": 9.8, "d": 9.7, "e": 9.6}
    _, rerun = played(expected, {name: [rate * 0.9] * 2 for name, rate in expected.items()})
    assert set(rerun.asked) == {"a", "b", "c"}


def test_who_may_still_lead_is_measured_again_and_who_cannot_is_not(played: Played) -> None:
    noisy = {"a": [10.0, 9.0, 9.5], "b": [9.8, 9.9, 9.4], "c": [5.0], "d": [1.0]}
    expected = {"a": 10, "b": 9.9, "c": 9.8, "d": 1}
    found, rerun = played(expected, noisy)
    assert rerun.asked == [*"abac", *"b", *"ab"]
    assert {each.config["optimizer"] for each in found.verified} == set("abc")
    clear = {"a": [10.0, 10.1], "b": [9.0], "c": [8.0]}
    assert played(expected, clear)[1].asked == [*"abac"]  # the leader alone needs another look


def test_the_one_to_recommend_was_measured_twice_whoever_it_is_in_the_end(played: Played) -> None:
    """The leader of the first round is slower in the second, and of two that are tied the smaller one is better."""
    turned = {"a": [10.0, 7.0, 7.0], "b": [9.0] * 3}
    found, rerun = played({"a": 10, "b": 9.9}, turned)
    assert rerun.asked[:4] == ["a", "b", "a", "b"]
    assert max(found.verified, key=lambda each: each.throughput).config["optimizer"] == "b"


@pytest.mark.parametrize(
    ("seconds", "asked"),
    [(0.0, "a"), (5.5, "a"), (6.5, "ab"), (12.5, "abac"), (15.5, "abacb"), (100.0, "abacbab")],
)
def test_once_something_is_verified_nothing_is_begun_that_would_end_too_late(
    played: Played, seconds: float, asked: str
) -> None:
    noisy = {"a": [10.0, 9.0, 9.5], "b": [9.8, 9.9, 9.4], "c": [5.0]}
    left = itertools.count(seconds - 3.0, -3.0)  # what each takes; it is asked from the second on
    found, rerun = played({"a": 10, "b": 9.9, "c": 9.8}, noisy, seconds_left=lambda: next(left))
    assert rerun.asked == [*asked]
    assert {each.config["optimizer"] for each in found.verified} == set(asked)


def test_however_little_time_is_left_one_that_fits_is_verified(played: Played) -> None:
    found, rerun = played(
        {"a": 10, "b": 9.9, "c": 9.8}, {"a": [0.0], "b": [9.0]}, seconds_left=lambda: 0.0
    )
    assert rerun.asked == ["a", "b"]
    assert [each.config["optimizer"] for each in found.verified] == ["b"]
    assert found.failed == (Config(optimizer="a"),)


def test_a_doubt_within_the_tolerance_is_none(played: Played) -> None:
    noisy = {"a": [10.0, 9.9, 10.0], "b": [9.9, 10.0, 10.0]}
    assert len(played({"a": 10, "b": 10}, noisy, tolerance=0.1)[1].asked) == 4
    assert len(played({"a": 10, "b": 10}, noisy, tolerance=0.0)[1].asked) == 6


def test_a_quick_search_confirms_the_winner_alone() -> None:
    those = [at("a", 10), at("b", 9), at("c", 8)]
    rerun = Rerun({"a": [0.0], "b": [8.5]})
    found = confirm(those, those, rerun, Ranking(0.03, lambda config: ()))
    assert rerun.asked == ["a", "b"]
    assert [(each.config["optimizer"], each.verified) for each in found.candidates()] == [
        ("b", True)
    ]
    assert found.failed == (Config(optimizer="a"),)


def test_nothing_that_fits_is_nothing_to_measure(played: Played) -> None:
    found, rerun = played({}, {})
    assert not rerun.asked
    assert found.candidates() == ()


def test_an_interrupt_leaves_what_was_explored() -> None:
    def interrupted(finalist: Measurement) -> Measurement:
        raise KeyboardInterrupt

    those = [at("a", 10)]
    found = verify(those, those, interrupted, Ranking(0.03, lambda config: ()))
    assert found.interrupted
    assert found.candidates() == tuple(those)


def test_an_interrupt_after_enough_rounds_keeps_what_they_verified() -> None:
    rerun, left = Rerun({"a": [10.0, 10.0], "b": [9.9]}), [3]

    def measure(finalist: Measurement) -> Measurement:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rerun(finalist)

    those = [at("a", 10), at("b", 9)]
    found = verify(those, those, measure, Ranking(0.03, lambda config: ()))
    assert found.interrupted
    assert [each.config["optimizer"] for each in found.candidates()] == ["a"]


def test_rounds_become_one_figure() -> None:
    one = verification.joined([at("a", 4.0, peak=30), at("a", 8.0, peak=20)])
    assert one.step_seconds
    assert one.step_seconds.median == pytest.approx(1.5)
    assert (one.step_seconds.low, one.step_seconds.high) == pytest.approx((0.9, 2.2))
    assert one.samples_per_second == pytest.approx(8 / 1.5)
    assert (one.seconds, one.steps, one.verified) == (6.0, 10, True)
    assert one.peak_bytes == PeakBytes(30)


def test_what_was_explored_on_fewer_cores_has_a_wider_field_and_calls_nobody_up_by_its_figures() -> (
    None
):
    rerun = Rerun({name: [1.0] * 3 for name in "abcdef"})
    those = [
        at(name, rate)
        for name, rate in {"a": 10, "b": 9.5, "c": 9.0, "d": 8.5, "e": 8.4, "f": 8.0}.items()
    ]
    found = verify(those, those, rerun, Ranking(0.03, lambda config: ()), elsewhere=True)
    assert set(rerun.asked) == set("abcde")
    assert len(found.verified) == 5


def of_lora(name: str, rate: float) -> Measurement:
    config = Config(optimizer=name, lora_rank=8)
    return Measurement(config, Outcome.FITS, samples_per_second=rate)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_best_of_each_tier_and_a_rival_close_to_it_are_measured_again(elsewhere: bool) -> None:
    full = [at("a", 10), at("d", 9.9)]
    lora = [of_lora("b", 1.0), of_lora("c", 1.0), of_lora("e", 0.97), of_lora("f", 0.8)]
    order: list[str] = []

    def measure(finalist: Measurement) -> Measurement:
        name = str(finalist.config["optimizer"])
        order.append(name)
        seen = at(name, 0 if name == "b" else 3.0)
        return dataclasses.replace(seen, config=finalist.config)

    those = [*full, *lora]
    found = verify(those, those, measure, Ranking(0.03, lambda config: ()), elsewhere=elsewhere)
    assert order == ["a", "d", "a", "d", "b", "c", "e"]
    assert [each.config["optimizer"] for each in found.verified] == ["a", "d", "c", "e"]
    assert found.failed == (lora[0].config,)


def test_a_tier_whose_best_is_far_ahead_has_no_rival_measured_again() -> None:
    those = [at("a", 10), at("d", 9.9), of_lora("b", 1.0), of_lora("c", 0.8)]
    order: list[str] = []

    def measure(finalist: Measurement) -> Measurement:
        order.append(str(finalist.config["optimizer"]))
        return dataclasses.replace(at(order[-1], 3.0), config=finalist.config)

    verify(those, those, measure, Ranking(0.03, lambda config: ()))
    assert order == ["a", "d", "a", "d", "b"]
