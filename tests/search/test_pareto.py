"""What lies around the best: frontiers by tier, and single changes of a knob."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.measurement import Outcome, PeakBytes
from autofit.core.pareto import OtherBudget, fastest_within, thinned
from autofit.core.result import TIERS, tier
from autofit.search.pareto import Evidence, pareto_report

Searched = Callable[..., Evidence]


def around(evidence: Evidence, *factors: float, **options: Any) -> Any:
    others = [OtherBudget("another", int(each * evidence.budget.device_bytes)) for each in factors]
    return pareto_report(evidence, others=others, **options)


@pytest.mark.parametrize("seed", range(6))
def test_what_other_budgets_would_run_is_nearly_the_best_they_could(
    formula: Any, searched: Searched, seed: int
) -> None:
    """Predictions here are off by one factor, so that the frontier is the true one but for noise."""
    problem = formula(seed, share=0.4)
    evidence = searched(problem, memory_off=1.05, speed_off=1.5)
    found = around(evidence, 0.5, 2.0)
    for factor in (0.5, 2.0):
        limit = factor * problem.budget
        for name in TIERS[:2]:
            speeds = [
                problem.speed(each)
                for each in problem.configs
                if tier(each) == name and problem.memory(each) <= limit
            ]
            point = fastest_within(found.frontier[name], limit)
            assert (point is None) == (not speeds)
            if point:
                assert problem.speed(point.config) == pytest.approx(max(speeds), rel=0.1)
                assert point.samples_per_second == pytest.approx(
                    problem.speed(point.config), rel=0.1
                )


def test_another_budget_is_told_where_it_would_run_something_else(
    formula: Any, searched: Searched
) -> None:
    evidence = searched(formula(2, share=0.4))
    assert [each.device_bytes for each in around(evidence, 0.5, 2.0).other_budgets] == [
        int(0.5 * evidence.budget.device_bytes),
        2 * evidence.budget.device_bytes,
    ]
    plenty = dataclasses.replace(evidence.budget, device_bytes=1000 * evidence.budget.device_bytes)
    evidence = dataclasses.replace(evidence, budget=plenty)
    assert around(evidence, 0.5, 2.0).other_budgets == ()
    larger = OtherBudget("the next larger card", 2 * plenty.device_bytes, "A6000")
    assert pareto_report(evidence, others=[larger]).other_budgets == (larger,), (
        "somebody may think of buying it"
    )


def test_frontiers_hold_what_was_measured_and_reach_beyond_the_budget(
    formula: Any, searched: Searched
) -> None:
    problem = formula(2, share=0.2)
    evidence = searched(problem)
    found = around(evidence)
    assert list(found.frontier) == list(TIERS[:-1])  # nothing is of the head alone
    assert found.frontier["qlora"] == ()
    points = [point for each in found.frontier.values() for point in each]
    assert all(
        tier(point.config) == name for name, each in found.frontier.items() for point in each
    )
    assert any(point.peak_bytes > problem.budget for point in points)
    assert all(point.peak_bytes <= problem.budget for point in points if point.measured)
    measured = {each.config: each for each in evidence.measurements if each.fits}
    for point in points:
        assert point.measured == (point.config in measured)
        if point.measured:
            assert point.samples_per_second == measured[point.config].throughput


def test_without_predictions_there_is_only_what_was_measured(
    formula: Any, searched: Searched
) -> None:
    problem = formula(2)
    evidence = dataclasses.replace(searched(problem), predictions=None, surrogate=None)
    found = around(evidence, tolerance=0.03)
    points = [point for each in found.frontier.values() for point in each]
    fitting = {each.config for each in evidence.measurements if each.fits}
    assert points
    assert {point.config for point in points} <= fitting
    assert all(each.measured for each in found.alternatives)
    assert evidence.best
    assert (
        fastest_within(found.frontier[tier(evidence.best.config)], problem.budget).config
        == evidence.best.config
    )


def test_a_frontier_is_short_and_keeps_what_it_is_asked_for(
    formula: Any, searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = searched(formula(4))
    asked = [0.3, 0.6, 0.9, 1.3]
    module = sys.modules["autofit.search.pareto"]
    monkeypatch.setattr(module, "thinned", lambda points, keep: tuple(points))
    whole = around(evidence, *asked).frontier["full"]
    monkeypatch.setattr(module, "thinned", functools.partial(thinned, most=7))
    found = around(evidence, *asked).frontier["full"]
    assert len(found) == 7 < len(whole)
    for factor in (*asked, 1.0):
        limit = int(factor * evidence.budget.device_bytes)
        assert fastest_within(found, limit) == fastest_within(whole, limit)
    assert (found[0], found[-1]) == (whole[0], whole[-1])


def test_single_changes_are_of_one_knob_and_what_follows_from_it(
    formula: Any, searched: Searched
) -> None:
    problem = formula(5, share=0.5)
    evidence = searched(problem)
    best = evidence.best.config
    told = around(evidence).alternatives
    assert len({(each.knob, each.value) for each in told}) == len(told)
    for each in told:
        differing = set(each.config.differences(best)) - {
            "gradient_accumulation_steps",
            "lora_targets",
        }
        assert differing == {each.knob}
        assert each.value != best[each.knob]
        assert each.fits == problem.fits(each.config) or not each.measured
    knobs = {knob for knob, values in problem.space.knobs.items() if len(values) > 1}
    assert {each.knob for each in told} == knobs
    assert [each.knob for each in told] == sorted(
        (each.knob for each in told), key=list(best).index
    )
    values = {each.value for each in told if each.knob == "lora_rank"} | {best["lora_rank"]}
    assert values == {0, 8, 16, 64}


def test_single_changes_are_told_as_they_were_measured(formula: Any, searched: Searched) -> None:
    problem = formula(5, share=0.5)
    evidence = searched(problem, trials=25)
    by_config = {each.config: each for each in evidence.measurements}
    told = around(evidence).alternatives
    assert any(each.measured for each in told)
    assert any(not each.measured for each in told)
    for each in told:
        assert each.measured == (each.config in by_config)
        if each.measured:
            assert each.outcome is by_config[each.config].outcome
            assert each.samples_per_second == by_config[each.config].samples_per_second
        else:
            assert each.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY)
            assert each.fits == (each.peak_bytes <= evidence.usable_bytes)


@pytest.mark.parametrize(("share", "told"), [(0.99, None), (1.2, 1.2)])
def test_what_ran_out_of_memory_before_its_peak_tells_no_size(
    formula: Any, searched: Searched, share: float, told: float | None
) -> None:
    evidence = searched(formula(5, share=0.5))
    best = evidence.best
    sdpa = {"sdpa": "eager", "eager": "sdpa"}[best.config["attention"]]
    missed = dataclasses.replace(
        best,
        config=best.config.replace(attention=sdpa),
        outcome=Outcome.OUT_OF_MEMORY,
        samples_per_second=None,
        peak_bytes=PeakBytes(int(share * evidence.usable_bytes)),
    )
    kept = tuple(each for each in evidence.measurements if each.config != missed.config)
    found = around(dataclasses.replace(evidence, measurements=(*kept, missed))).alternatives
    (other,) = (each for each in found if each.knob == "attention")
    assert other.measured
    assert not other.fits
    assert other.peak_bytes == (told and int(told * evidence.usable_bytes))


def test_what_failed_when_verified_is_nowhere(formula: Any, searched: Searched) -> None:
    evidence = searched(formula(5, share=0.5), trials=30)
    single = next(each for each in around(evidence).alternatives if each.measured and each.fits)
    found = around(dataclasses.replace(evidence, failed=(single.config,)))
    assert single.config not in {point.config for each in found.frontier.values() for point in each}
    assert single.config not in {each.config for each in found.alternatives}


def test_where_nothing_fits_the_smallest_budget_is_known(formula: Any, searched: Searched) -> None:
    problem = formula(6)
    problem.budget = 0.5 * min(map(problem.memory, problem.configs))
    evidence = searched(problem, trials=3)
    assert evidence.best is None
    found = around(evidence)
    assert found.alternatives == ()
    least = min(
        (points[0] for points in found.frontier.values() if points),
        key=lambda point: point.peak_bytes,
    )
    assert not least.measured
    assert least.peak_bytes == pytest.approx(min(map(problem.memory, problem.configs)), rel=0.05)
