"""What is believed of configs never measured: predictions, put right by the measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Outcome, PeakBytes
from autofit.core.result import TIERS, tier
from autofit.search.beside_tensors import beside_tensors
from autofit.search.pareto import Evidence, leading, predicted_points
from autofit.search.predictions import Predictions

Searched = Callable[..., Evidence]


def test_what_predictions_were_off_by_is_put_right(formula: Any, searched: Searched) -> None:
    problem = formula(3)
    evidence = searched(problem, memory_off=1.1, speed_off=0.6)
    found = predicted_points(problem.configs, evidence)
    measured = {
        each.config for each in evidence.measurements if each.outcome is not Outcome.OUT_OF_MEMORY
    }
    assert set(found) == set(problem.configs) - measured
    speeds = [each.samples_per_second / problem.speed(config) for config, each in found.items()]
    sizes = [
        each.peak_bytes / problem.memory(config)
        for config, each in found.items()
        if problem.fits(config)
    ]
    assert statistics.median(speeds) == pytest.approx(1, abs=0.05)  # 1 / 0.6 as predicted
    assert statistics.median(sizes) == pytest.approx(1, abs=0.02)
    some = next(iter(found.values()))
    assert some.tokens_per_second == pytest.approx(64 * some.samples_per_second)
    assert not some.measured


def test_what_ran_out_of_memory_is_never_predicted_to_fit(formula: Any, searched: Searched) -> None:
    """Nor what an out-of-memory proves of others, whatever is predicted of them."""
    problem = formula(1, share=0.15)
    evidence = searched(problem, memory_off=1.6)
    missed = [
        each.config for each in evidence.measurements if each.outcome is Outcome.OUT_OF_MEMORY
    ]
    assert missed
    found = predicted_points(problem.configs, evidence)
    for config in missed:
        assert found[config].peak_bytes > problem.budget
        larger = config.replace(activation_checkpointing="none")
        assert found[larger].peak_bytes > problem.budget


def test_of_one_that_was_measured_too_large_the_size_is_known(
    formula: Any, searched: Searched
) -> None:
    problem = formula(1, share=0.15)
    evidence = searched(problem, memory_off=1.6)
    place, missed = next(
        (place, each)
        for place, each in enumerate(evidence.measurements)
        if each.outcome is Outcome.OUT_OF_MEMORY
    )
    measurements = list(evidence.measurements)
    measurements[place] = dataclasses.replace(missed, peak_bytes=PeakBytes(7 * int(problem.budget)))
    told = predicted_points(
        [missed.config], dataclasses.replace(evidence, measurements=measurements)
    )
    assert told[missed.config].peak_bytes >= 7 * int(problem.budget)


def test_without_predictions_nothing_is_predicted_points(formula: Any, searched: Searched) -> None:
    problem = formula(3)
    evidence = searched(problem)
    assert not predicted_points(problem.configs, dataclasses.replace(evidence, predictions=None))
    assert not predicted_points(problem.configs, dataclasses.replace(evidence, surrogate=None))
    assert evidence.predictions
    unknown = dict.fromkeys(problem.configs, math.nan)
    for expected in (
        Predictions(unknown, evidence.predictions.seconds),
        Predictions(evidence.predictions.nbytes, unknown),
    ):
        assert not predicted_points(
            problem.configs, dataclasses.replace(evidence, predictions=expected)
        )


def test_what_failed_when_verified_or_crashes_is_left_out(formula: Any, searched: Searched) -> None:
    problem = formula(3)
    evidence = searched(problem)
    open_ones = list(predicted_points(problem.configs, evidence))
    failed = open_ones[0]
    assert failed not in predicted_points(
        problem.configs, dataclasses.replace(evidence, failed=(failed,))
    )
    eager = [each for each in problem.configs if each["attention"] == "eager"][::5]
    crashed = [
        dataclasses.replace(evidence.measurements[0], config=each, outcome=Outcome.FAILED)
        for each in eager
    ]
    told = predicted_points(
        problem.configs,
        dataclasses.replace(evidence, measurements=(*evidence.measurements, *crashed)),
    )
    assert 0 < len(told) < len(open_ones)
    assert not any(config["attention"] == "eager" for config in told)


def test_on_a_gpu_the_allocators_share_and_the_context_count(
    formula: Any, searched: Searched
) -> None:
    problem = formula(3)
    evidence = searched(problem)
    hardware = dataclasses.replace(evidence.hardware, device="cuda", context_bytes=10**9)
    tensors = predicted_points(problem.configs, evidence)
    config = next(config for config in tensors if 2 * problem.memory(config) < problem.budget)
    before = dataclasses.replace(evidence, hardware=hardware, measurements=())
    size = predicted_points([config], before)[config].peak_bytes
    beside = beside_tensors((), 10**9)
    assert size == pytest.approx(beside.held(problem.memory(config)), rel=0.01)

    def on_gpu(peak: PeakBytes) -> PeakBytes:
        reserved = int(1.25 * peak.allocated)
        return PeakBytes(peak.allocated, reserved, reserved + 2 * 10**9)

    fitting = [
        dataclasses.replace(each, peak_bytes=on_gpu(each.peak_bytes))
        for each in evidence.measurements
        if each.fits and each.peak_bytes
    ]
    after = dataclasses.replace(evidence, hardware=hardware, measurements=fitting)
    told = predicted_points([config], after)[config].peak_bytes
    assert told == pytest.approx(1.25 * problem.memory(config) + 2 * 10**9, rel=0.02)


def test_all_speeds_are_told_at_the_level_of_the_best(formula: Any, searched: Searched) -> None:
    """Where the machine has become slower until the best was verified, all else would be slower, too."""
    problem = formula(3)
    evidence = searched(problem)
    best = evidence.best
    assert best
    assert best.step_seconds
    verified = dataclasses.replace(best.taking(best.step_seconds.median * 1.25), verified=True)
    slower = dataclasses.replace(
        evidence, best=verified, measurements=(*evidence.measurements, verified)
    )
    assert slower.latest[best.config] == verified
    for each in evidence.measurements:
        if each.fits and each.config != best.config:
            assert slower.latest[each.config].throughput == pytest.approx(each.throughput / 1.25)
    before, after = (
        predicted_points(problem.configs, evidence),
        predicted_points(problem.configs, slower),
    )
    ratios = [
        after[config].samples_per_second / each.samples_per_second
        for config, each in before.items()
    ]
    assert statistics.median(ratios) == pytest.approx(1 / 1.25, rel=0.03)
    as_they_are = {each.config: each for each in evidence.measurements}
    assert evidence.latest == as_they_are
    assert dataclasses.replace(evidence, best=None).latest == as_they_are


def test_a_best_that_is_faster_than_expected_does_not_make_all_else_slower(
    formula: Any, searched: Searched
) -> None:
    """What a knob buys is no matter of how lucky the best was: single changes are told relative to it."""
    problem = formula(3)
    evidence = searched(problem)
    best = evidence.best
    assert best
    assert best.step_seconds
    lucky = best.taking(best.step_seconds.median / 1.2)
    measurements = [lucky if each.config == best.config else each for each in evidence.measurements]
    told = predicted_points(
        problem.configs, dataclasses.replace(evidence, best=lucky, measurements=measurements)
    )
    near = [config for config in told if len(config.differences(best.config)) <= 2]
    assert near
    true = {config: problem.speed(config) / problem.speed(best.config) for config in near}
    ratios = [told[config].samples_per_second / lucky.throughput / true[config] for config in near]
    assert statistics.median(ratios) > 0.94  # 1 / 1.2 without


def test_the_leading_ones_are_near_the_frontier_of_their_tier() -> None:
    configs = [Config(number=number, lora_rank=rank) for rank in (0, 8) for number in range(5)]
    nbytes = [1.0, 2.0, 3.0, 4.0, math.nan] * 2
    seconds = [4.0, 5.0, 2.0, 2.1, 1.0] * 2
    found = leading(Predictions.of(configs, nbytes, seconds), 3)
    assert sorted(found, key=configs.index) == [
        each for each in configs if each["number"] in (0, 2, 3)
    ]
    everything = leading(Predictions.of(configs, nbytes, seconds), 100)
    assert {tier(each) for each in everything} == set(TIERS[:2])
    assert len(everything) == 8
