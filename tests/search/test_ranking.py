from __future__ import annotations

from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.search.ranking import Ranking, fastest, nearest_miss

FIDELITY = {"fp32": 2, "bf16-mixed": 1, "bf16": 0}


def fidelity(config: Config) -> tuple[int, ...]:
    return (0 if config.get("lora_rank") else 1, FIDELITY[str(config["precision"])])


RANKING = Ranking(0.03, fidelity)


def measured(
    number: int,
    speed: float,
    precision: str = "bf16",
    *,
    gib: int | None = 10,
    outcome: str = "fits",
    **knobs: Any,
) -> Measurement:
    return Measurement(
        Config(precision=precision, number=number, **knobs),
        Outcome(outcome),
        number=number,
        samples_per_second=speed,
        peak_bytes=None if gib is None else PeakBytes(gib * 2**30),
    )


def choose(*measurements: Measurement, tolerance: float = 0.03) -> int:
    best = Ranking(tolerance, fidelity).recommend(measurements)
    assert best is not None
    return best.number


def test_fastest_is_of_those_that_fit() -> None:
    best = fastest(
        [measured(0, 5), measured(1, 9, outcome="timed_out"), measured(2, 7), measured(3, 7)]
    )
    assert best is not None
    assert best.number == 2


@pytest.mark.parametrize("rule", [fastest, nearest_miss])
def test_nothing_to_choose_from(rule: Any) -> None:
    assert rule([]) is None
    assert rule([measured(0, 0, outcome="failed")]) is None


def test_pick_of_nothing_is_none() -> None:
    assert RANKING.recommend([measured(0, 0, outcome="out_of_memory")]) is None
    assert RANKING.finalists([]) == []


def test_among_ties_the_more_faithful_wins() -> None:
    assert (
        choose(
            measured(0, 100.0, "bf16"), measured(1, 97.5, "fp32"), measured(2, 98.0, "bf16-mixed")
        )
        == 1
    )


def test_beyond_the_tolerance_only_speed_counts() -> None:
    assert choose(measured(0, 100.0, "bf16"), measured(1, 96.0, "fp32")) == 0
    assert choose(measured(0, 100.0, "bf16"), measured(1, 96.0, "fp32"), tolerance=0.05) == 1


def test_ties_are_with_the_fastest_not_with_one_another() -> None:
    assert choose(measured(0, 100.0), measured(1, 98.0), measured(2, 96.0, "fp32")) != 2


def test_equally_faithful_ties_go_to_less_memory_then_to_speed() -> None:
    assert (
        choose(measured(0, 100.0, gib=12), measured(1, 98.0, gib=8), measured(2, 99.0, gib=8)) == 2
    )
    assert choose(measured(0, 100.0, gib=None), measured(1, 98.0, gib=8)) == 1


def test_equally_faithful_ties_go_to_fewer_packages_before_less_memory() -> None:
    ranking = Ranking(0.03, fidelity, packages=lambda config: int(config["number"] == 0))
    best = ranking.recommend([measured(0, 100.0, gib=8), measured(1, 99.0, gib=12)])
    assert best is not None
    assert best.number == 1


def test_what_is_too_close_to_call_is_named() -> None:
    close, far = measured(0, 98.0), measured(1, 90.0)
    best = measured(2, 100.0, "fp32")
    assert RANKING.close_calls(best, [close, best, far]) == [close]
    assert RANKING.close_calls(far, [far]) == []


def test_no_tolerance_means_the_fastest() -> None:
    assert choose(measured(0, 100.0, "bf16"), measured(1, 99.9, "fp32"), tolerance=0.0) == 0


def test_finalists_are_the_pick_then_the_pick_of_the_others() -> None:
    measurements = [
        measured(0, 50.0),
        measured(1, 100.0),
        measured(2, 98.0, "fp32"),
        measured(3, 80.0),
    ]
    chosen = RANKING.finalists(measurements)
    assert [each.number for each in chosen] == [2, 1, 3, 0]


def test_a_finalist_measured_twice_is_not_its_own_runner_up() -> None:
    first = measured(0, 100.0)
    again = Measurement(first.config, Outcome.FITS, number=5, samples_per_second=101.0)
    chosen = RANKING.finalists([first, again, measured(1, 90.0)])
    assert [each.config["number"] for each in chosen] == [0, 1]


def test_the_best_of_each_tier() -> None:
    tiers = RANKING.best_of_tiers(
        [
            measured(0, 10.0, "fp32", lora_rank=0),
            measured(1, 30.0, lora_rank=8),
            measured(2, 29.5, "fp32", lora_rank=8),
            measured(3, 40.0, lora_rank=8, quantization="nf4", outcome="out_of_memory"),
        ]
    )
    assert {name: best and best.number for name, best in tiers.items()} == {
        "full": 0,
        "lora": 2,
        "qlora": None,
        "head": None,
    }


def test_the_nearest_miss_is_the_smallest_that_ran_out() -> None:
    misses = [
        measured(number, 0, gib=gib, outcome="out_of_memory")
        for number, gib in enumerate([30, None, 26, 40])
    ]
    near = nearest_miss([*misses, measured(9, 5, gib=20)])
    assert near is not None
    assert near.number == 2
    assert nearest_miss([misses[1]]) is misses[1]
