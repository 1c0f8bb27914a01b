from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import pytest

from autofit.core.config import Config, Value
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import tier
from autofit.search.encoding import Encoding
from autofit.search.predictions import Predictions
from autofit.search.pruning import ruled_out
from autofit.search.sampler import MEASUREMENT, SurrogateSampler, measurements_of
from autofit.search.surrogate import Surrogate
from tests.search.conftest import EFFECTIVE_BATCH


def candidates(sampler: SurrogateSampler, measurements: Sequence[Measurement]) -> list[Config]:
    """The configs that may still be proposed."""
    left = sampler.left(measurements).tolist()
    return [
        config
        for config, is_left in zip(sampler.surrogate.pool.configs, left, strict=True)
        if is_left
    ]


def sampler_of(
    problem: Any, pool: Sequence[Config] | None = None, seed: int = 0, **options: Any
) -> SurrogateSampler:
    values: Mapping[str, tuple[Value, ...]] = {
        **problem.space.knobs,
        "lora_targets": ("all-linear", None),
    }
    order = problem.problem().memory_order
    surrogate = Surrogate(
        values, problem.configs if pool is None else pool, memory_order=order, **options
    )
    return SurrogateSampler(surrogate, seed=seed)


def run(sampler: SurrogateSampler, problem: Any, trials: int) -> list[Measurement]:
    measurements: list[Measurement] = []
    for number in range(trials):
        measurements.append(problem.probe(number, sampler.choose(measurements)))
    return measurements


def test_begins_with_the_most_frugal_config(formula: Any) -> None:
    first = sampler_of(formula()).choose([])
    assert first == Config(
        precision="bf16",
        micro_batch_size=1,
        activation_checkpointing="full",
        lora_rank=8,
        lora_targets="all-linear",
        optimizer="adamw-8bit",
        attention="sdpa",
        gradient_accumulation_steps=32,
    )


def test_proven_ranks_go_before_the_order_of_the_space() -> None:
    ranks = {"high": 5, "low": 1, "middle": 3}
    pool = [Config(knob=value) for value in ("unranked", "high", "low", "middle")]
    values = {"knob": ("unranked", "high", "low", "middle")}
    sampler = SurrogateSampler(
        Surrogate(values, pool, memory_order=lambda knob, value: ranks.get(str(value)))
    )
    seen: list[Measurement] = []
    while candidates(sampler, seen):
        seen.append(Measurement(sampler.choose(seen), Outcome.HOST_OUT_OF_MEMORY))
    assert [each.config["knob"] for each in seen][1:] == ["low", "middle", "high"]


def test_goes_on_to_frugal_configs_until_something_fits(formula: Any) -> None:
    problem = formula(1, share=0.005)
    measurements = run(sampler_of(problem), problem, 8)
    before = [
        each for each in measurements if not any(one.fits for one in measurements[: each.number])
    ]
    median = sorted(map(problem.memory, problem.configs))[len(problem.configs) // 2]
    assert all(problem.memory(each.config) < median for each in before)
    assert any(each.fits for each in measurements)


def test_never_proposes_what_is_measured_or_proven_not_to_fit(formula: Any) -> None:
    problem = formula(2, share=0.1)
    problem.configs = [config for config in problem.configs if config["lora_rank"] == 0]
    sampler = sampler_of(problem)
    measurements: list[Measurement] = []
    while candidates(sampler, measurements):
        measurements.append(problem.probe(len(measurements), sampler.choose(measurements)))
    measured = {each.config for each in measurements}
    assert len(measured) == len(measurements) < len(problem.configs)
    # What was never proposed cannot fit.
    assert not any(problem.fits(config) for config in problem.configs if config not in measured)
    with pytest.raises(LookupError):
        sampler.choose(measurements)


def test_the_same_seed_makes_the_same_choices_and_forgetting_changes_nothing(formula: Any) -> None:
    problem = formula(3)
    measurements = run(sampler_of(problem, seed=-5), problem, 12)
    assert run(sampler_of(problem, seed=-5), problem, 12) == measurements
    # A new sampler that is given the past chooses what the old one chose.
    for number in range(12):
        assert (
            sampler_of(problem, seed=-5).choose(measurements[:number])
            == measurements[number].config
        )


def test_avoids_values_that_do_not_work(formula: Any) -> None:
    problem = formula(4, share=0.9)
    sampler = sampler_of(problem)
    measurements: list[Measurement] = []
    for number in range(24):
        config = sampler.choose(measurements)
        broken = config["precision"] == "bf16" or config["attention"] == "eager"
        measurement = problem.probe(number, config)
        measurements.append(
            Measurement(config, Outcome.FAILED, number=number) if broken else measurement
        )
    failed = [each.outcome is Outcome.FAILED for each in measurements]
    assert sum(failed) <= 8  # of all configs, 2 in 3 are broken
    assert any(each.fits for each in measurements[:8])


@pytest.mark.parametrize("known", [True, False])
def test_knowing_the_limit_is_not_needed(formula: Any, known: bool) -> None:
    problem = formula(5)
    sampler = sampler_of(problem, memory_bytes=int(problem.budget) if known else None)
    speeds = [each.throughput for each in run(sampler, problem, 20)]
    assert max(speeds) > 0.9 * problem.best()


def test_measurements_without_figures_are_no_obstacle(formula: Any) -> None:
    problem = formula(6)
    sampler = sampler_of(problem)
    measurements: list[Measurement] = []
    for number, outcome in enumerate(Outcome):
        measurements.append(Measurement(sampler.choose(measurements), outcome, number=number))
    assert len({each.config for each in measurements}) == len(Outcome)


def test_serves_an_ordinary_optuna_study(formula: Any, capsys: pytest.CaptureFixture[str]) -> None:
    problem = formula(7)
    sampler = sampler_of(problem)

    def objective(trial: optuna.Trial) -> float:
        params = {
            name: trial.suggest_categorical(name, each.choices)
            for name, each in sampler.distributions.items()
            if isinstance(each, optuna.distributions.CategoricalDistribution)
        }
        measurement = problem.probe(trial.number, sampler.config(params))
        trial.set_user_attr(MEASUREMENT, measurement.to_trial())
        if not measurement.fits:
            raise optuna.TrialPruned
        return float(measurement.throughput)

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.optimize(objective, n_trials=10)
    finally:
        optuna.logging.set_verbosity(before)
    assert [each.config for each in measurements_of(study)] == problem.probed
    assert problem.probed == [each.config for each in run(sampler_of(problem), formula(7), 10)]
    assert capsys.readouterr().err == ""


def test_an_unknown_parameter_is_an_error(formula: Any) -> None:
    study = optuna.create_study(sampler=sampler_of(formula()))
    with pytest.raises(LookupError, match="dropout"):
        study.ask().suggest_float("dropout", 0, 1)


def test_what_is_being_measured_is_not_proposed_and_its_figures_are_expected(formula: Any) -> None:
    problem = formula(5, share=0.3)
    sampler = sampler_of(problem, memory_bytes=int(problem.budget))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    measurements = run(sampler, problem, 10)
    for measured in measurements:
        trial = study.ask(sampler.distributions)
        trial.set_user_attr(MEASUREMENT, measured.to_trial())
        study.tell(trial, 1.0)
    asked = [sampler.config(study.ask(sampler.distributions).params) for _ in range(6)]
    assert len({*asked, *(each.config for each in measurements)}) == 16
    assert sampler.running(study) == asked

    believed = sampler.with_running(measurements, asked)
    assert believed[:10] == measurements
    for config, expected in zip(asked, believed[10:], strict=True):
        assert expected.config == config
        assert expected.number < 0
        if expected.fits:
            assert expected.step_seconds
            assert expected.step_seconds.median == pytest.approx(
                32 / problem.speed(config), rel=0.4
            )


def test_nothing_is_proposed_that_a_config_being_measured_would_rule_out(formula: Any) -> None:
    """Before anything is known, whether each fits is in doubt; from what surely fits, larger ones follow."""
    problem = formula(5, share=0.3)
    sampler, order = sampler_of(problem), problem.problem().memory_order
    asked: list[Config] = []
    for _ in range(6):
        asked.append(sampler.choose(sampler.with_running([], asked)))
    for index, config in enumerate(asked):
        assert not any(
            ruled_out(earlier, Encoding([config]), order).any() for earlier in asked[:index]
        )
    pool = [asked[0].replace(activation_checkpointing=value) for value in ("full", "none")]
    few = sampler_of(problem, pool)
    assert few.choose(few.with_running([], pool[:1])) == pool[1]  # where there is no other


def test_an_out_of_memory_that_is_only_expected_rules_nothing_out(formula: Any) -> None:
    problem = formula(1)
    sampler = sampler_of(problem, memory_bytes=int(problem.budget))
    smallest = min(problem.configs, key=problem.memory)
    expected = Measurement(smallest, Outcome.OUT_OF_MEMORY, -1)
    assert len(candidates(sampler, [expected])) == len(problem.configs) - 1
    assert (
        len(candidates(sampler, [Measurement(smallest, Outcome.OUT_OF_MEMORY, 0)]))
        < len(problem.configs) - 1
    )


def predictions_of(problem: Any, *, memory_off: Callable[[Config], float]) -> Predictions:
    nbytes = [problem.memory(config) * memory_off(config) for config in problem.configs]
    return Predictions.of(
        problem.configs, nbytes, [1 / problem.speed(config) for config in problem.configs]
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_where_predictions_prove_exact_no_probe_runs_out_of_memory(
    formula: Any, share: float
) -> None:
    """However many configs are predicted just above the limit; and what is found is the best."""
    problem = formula(8, share=share, noise=0.05)
    exact = predictions_of(problem, memory_off=lambda config: 1.0)
    measured = run(
        sampler_of(problem, predictions=exact, memory_bytes=int(problem.budget)), problem, 16
    )
    assert all(each.fits for each in measured)
    assert max(each.throughput for each in measured) > 0.95 * problem.best()


def test_what_hardly_fits_is_measured_only_for_much(formula: Any) -> None:
    """Predictions that are off by chance: which configs fit is in doubt, and few of those unlikely to are tried."""
    problem = formula(9, noise=0.05)
    off = predictions_of(
        problem, memory_off=lambda config: math.exp(random.Random(config.key).gauss(0, 0.06))
    )
    sampler = sampler_of(problem, predictions=off, memory_bytes=int(problem.budget))
    measured = run(sampler, problem, 6)
    surrogate, left = sampler.surrogate, sampler.left(measured)
    feasible = surrogate.probability_feasible(measured, surrogate.pool)
    doubtful = left & (feasible > 0.1) & (feasible < 0.4)
    assert doubtful.any()
    assert not (surrogate.probe_candidates(measured, left) & doubtful).any()
    nothing_to_beat = surrogate.probe_candidates(measured, left, [])
    assert (nothing_to_beat & doubtful).any()


def test_a_config_whose_one_probe_was_probably_disturbed_is_measured_again(formula: Any) -> None:
    problem = formula(3, share=0.999)
    seconds = [EFFECTIVE_BATCH / problem.speed(config) for config in problem.configs]
    nbytes = list(map(problem.memory, problem.configs))
    expected = Predictions.of(problem.configs, nbytes, seconds)
    surrogate = sampler_of(problem, predictions=expected).surrogate
    sampler = SurrogateSampler(surrogate, tolerance=0.03)

    fastest = sorted(problem.configs, key=problem.speed)[::-1]
    slower = [each for each in fastest if problem.speed(each) < 0.9 * problem.speed(fastest[0])]
    fastest = [fastest[0], *slower[:30:6]]
    seen = [problem.probe(number, config) for number, config in enumerate(fastest)]
    assert surrogate.doubtful(seen, 0.03) is None
    assert sampler.choose(seen) not in fastest

    slow = [seen[0].faster(1 / 1.5), *seen[1:]]
    assert surrogate.doubtful(slow, 0.03) == fastest[0]
    assert sampler.choose(slow) == fastest[0]

    again = [*slow, dataclasses.replace(seen[0], number=6)]
    assert surrogate.doubtful(again, 0.03) is None
    leader = surrogate.leader(again)
    assert leader
    assert leader.config == fastest[0]

    # A dear probe is believed.
    dear = [dataclasses.replace(slow[0], seconds=100.0), *slow[1:]]
    assert surrogate.doubtful(dear, 0.03) is None


def test_of_tiers_that_were_seen_as_little_the_most_promising_one_comes_first(formula: Any) -> None:
    problem = formula(3, share=0.999)
    exact = predictions_of(problem, memory_off=lambda config: 1.0)
    surrogate = sampler_of(problem, predictions=exact).surrogate
    sampler = SurrogateSampler(surrogate, of_each_tier=2)

    by_tier: dict[str, list[Config]] = {}
    for config in sorted(problem.configs, key=problem.speed):
        by_tier.setdefault(tier(config), []).append(config)
    assert len(by_tier) > 1

    slowest = [of_tier[0] for of_tier in by_tier.values()]
    seen = [problem.probe(number, config) for number, config in enumerate(slowest)]
    assert set(sampler.little_seen(seen).values()) == {1}
    first = tier(sampler.choose(seen))
    assert first == max(by_tier, key=lambda name: problem.speed(by_tier[name][-1]))


def test_a_quick_search_looks_for_the_much_better_before_it_looks_at_every_tier(
    formula: Any,
) -> None:
    problem = formula(3, share=0.999)
    seconds = [EFFECTIVE_BATCH / problem.speed(config) for config in problem.configs]
    nbytes = list(map(problem.memory, problem.configs))
    exact = Predictions.of(problem.configs, nbytes, seconds)
    memory_bytes = int(problem.budget)
    surrogate = sampler_of(problem, predictions=exact, memory_bytes=memory_bytes).surrogate
    thorough = SurrogateSampler(surrogate, of_each_tier=1, tolerance=0.1)
    quick = SurrogateSampler(surrogate, of_each_tier=1, tolerance=0.1, polishes_tiers=False)

    by_speed = sorted(filter(problem.fits, problem.configs), key=problem.speed)
    best = tier(by_speed[-1])
    slowest = next(config for config in by_speed if tier(config) == best)
    seen = [problem.probe(0, slowest)]
    assert quick.expects_much_better(seen)
    assert quick.little_seen(seen)
    assert tier(quick.choose(seen)) == best
    assert tier(thorough.choose(seen)) != best

    fastest = [problem.probe(0, by_speed[-1])]
    assert not quick.expects_much_better(fastest)
    assert tier(quick.choose(fastest)) != best


@pytest.mark.parametrize(("faster", "begins_with"), [(1.3, "default"), (1.1, "none")])
def test_a_quick_search_begins_with_a_dear_probe_of_what_is_much_better(
    formula: Any, faster: float, begins_with: str
) -> None:
    """Compiling is expected to take half a minute; another search begins with a cheap probe."""
    problem = formula(3, share=0.999)
    pool, nbytes, seconds = [], [], []
    for config in problem.configs:
        for value, gain in (("none", 1.0), ("default", faster)):
            pool.append(Config({**config, "compile": value}))
            nbytes.append(0.5 * problem.budget)
            seconds.append(EFFECTIVE_BATCH / problem.speed(config) / gain)

    values = {**problem.space.knobs, "lora_targets": ("all-linear", None)}
    surrogate = Surrogate(
        {**values, "compile": ("none", "default")},
        pool,
        memory_order=problem.problem().memory_order,
        memory_bytes=int(problem.budget),
        predictions=Predictions.of(pool, nbytes, seconds),
    )
    quick = SurrogateSampler(surrogate, tolerance=0.1, polishes_tiers=False)
    thorough = SurrogateSampler(surrogate, tolerance=0.03)
    assert quick.choose([])["compile"] == begins_with
    assert thorough.choose([])["compile"] == "none"


def test_a_dear_probe_must_promise_as_much_more(formula: Any) -> None:
    problem = formula(3, share=0.999)
    exact = predictions_of(problem, memory_off=lambda config: 1.0)
    sampler = sampler_of(problem, predictions=exact)
    slowest = sorted(problem.configs, key=problem.speed)[:6]
    probes = [problem.probe(number, config) for number, config in enumerate(slowest)]

    def gain(seconds: Sequence[float]) -> float:
        seen = [
            dataclasses.replace(probe, seconds=its)
            for probe, its in zip(probes, seconds, strict=True)
        ]
        return math.log1p(sampler.surrogate.expected_gain(seen, sampler.left(seen), seen))

    cheap = gain([10.0] * 6)
    assert cheap > 0.1
    assert gain([0.0] * 6) >= cheap, "what they cost is unknown"
    assert gain([1.0, *[10.0] * 5]) < cheap / 2, "another one is as dear as most of them were"
