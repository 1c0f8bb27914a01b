from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, StepSeconds
from autofit.search.costs import Costs
from autofit.search.linear_model import Features
from autofit.search.predictions import Predictions
from autofit.search.space import Space
from autofit.search.study import Limits, search

VALUES = {
    "compile": ("none", "default", "max-autotune-no-cudagraphs"),
    "optimizer": ("adamw", "adamw-8bit"),
    "micro_batch_size": (1, 4),
}
CONFIGS = [
    Config({"compile": compiled, "optimizer": optimizer, "micro_batch_size": micro})
    for compiled in VALUES["compile"]
    for optimizer in VALUES["optimizer"]
    for micro in VALUES["micro_batch_size"]
]
PLAIN, COMPILED, AUTOTUNED = CONFIGS[0], CONFIGS[4], CONFIGS[8]


def probed(config: Config, seconds: float, outcome: Outcome = Outcome.FITS) -> Measurement:
    return Measurement(
        config, outcome, step_seconds=StepSeconds(1, 1, 1), samples_per_second=1.0, seconds=seconds
    )


def seconds_of(measurements: list[Measurement]) -> dict[Config, float]:
    features = Features(VALUES)
    found = Costs(features).seconds(measurements, features.rows(CONFIGS))
    return dict(zip(CONFIGS, found.tolist(), strict=True))


def test_before_any_probe_only_compiling_is_expected_to_cost_more() -> None:
    told = seconds_of([])
    assert {round(told[each] / told[PLAIN], 6) for each in CONFIGS[:4]} == {1.0}
    assert 5 < told[COMPILED] / told[PLAIN] < 20
    # which times many kernels, one after the other
    assert 3 < told[AUTOTUNED] / told[COMPILED] < 10


@given(st.lists(st.sampled_from(CONFIGS[:4]), min_size=1, max_size=6), st.floats(0.01, 1e4))
def test_what_a_probe_costs_scales_with_those_seen_and_compiling_does_not(
    seen: list[Config], scale: float
) -> None:
    one, other = (
        seconds_of([probed(each, 1.0) for each in seen]),
        seconds_of([probed(each, scale) for each in seen]),
    )
    np.testing.assert_allclose([other[each] / one[each] for each in CONFIGS[:4]], scale, rtol=1e-2)
    compiling = [found[COMPILED] - found[PLAIN] for found in (one, other)]
    assert compiling == pytest.approx([37.0, 37.0], rel=0.5)


def test_what_compiling_really_took_is_learnt() -> None:
    told = seconds_of([probed(PLAIN, 3.0), probed(COMPILED, 4.0)])
    assert told[COMPILED] / told[PLAIN] < 4
    assert told[CONFIGS[6]] / told[CONFIGS[2]] < 4  # with another optimizer too


def test_one_probe_that_was_held_up_and_those_that_ended_early_tell_little() -> None:
    usual = [probed(each, 3.0) for each in CONFIGS[:4]]
    assert seconds_of([*usual, probed(CONFIGS[1], 3000.0)])[PLAIN] < 2 * seconds_of(usual)[PLAIN]
    assert seconds_of([*usual, probed(PLAIN, 0.1, Outcome.OUT_OF_MEMORY)]) == seconds_of(usual)


def compile_of_each_probe(formula: Any, promised: float, limits: Limits) -> list[Any]:
    """The search of a space that is compiled or not, where compiled steps take so many times as long."""
    problem = formula(0, share=0.9)
    knobs = {knob: values[:1] for knob, values in problem.space.knobs.items()}
    space = Space(
        "two",
        "",
        {**knobs, "optimizer": ("adamw",), "compile": ("none", "default"), "attention": ("sdpa",)},
    )
    space = dataclasses.replace(
        space, knobs={**space.knobs, "precision": ("bf16", "fp32", "bf16-mixed")}
    )
    asked = problem.problem()
    configs = list(space.configs(asked.constraints))
    promise = {config: 1.0 if config["compile"] == "none" else promised for config in configs}
    told = Predictions.of(configs, [1.0] * len(configs), [promise[config] for config in configs])
    probed: list[Config] = []

    def probe(number: int, config: Config, best: float | None) -> Measurement:
        probed.append(config)
        step = promise[config] * math.exp(0.01 * number)
        steps = StepSeconds(step, step, step)
        return Measurement(
            config, Outcome.FITS, step_seconds=steps, samples_per_second=1 / step, seconds=3.0
        )

    search(space, dataclasses.replace(asked, probe=probe, predict=lambda _: told), limits=limits)
    return [each["compile"] for each in probed]


def test_of_two_that_promise_the_same_the_cheaper_is_measured_first(formula: Any) -> None:
    """Compiled ones promise a little more, but by far not so much as they cost."""
    assert compile_of_each_probe(formula, 0.97, Limits(trials=4)) == [
        "none",
        "none",
        "none",
        "default",
    ]


@pytest.mark.parametrize(("seconds", "second"), [(12.0, "none"), (1000.0, "default")])
def test_what_would_take_longer_than_there_is_time_for_is_left_out(
    formula: Any, seconds: float, second: str
) -> None:
    """Compiled ones take twice as long in a probe of 3 s as the cost of the first one says, and 8 times that."""
    seen = compile_of_each_probe(formula, 0.1, Limits(trials=2, time_limit=seconds))
    assert seen == ["none", second]
