from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import tier
from autofit.search import study as study_module
from autofit.search.enumeration import Enumeration
from autofit.search.journal import Journal
from autofit.search.objectives.discounted import PREFERENCES
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, prior_measurement
from autofit.search.ranking import Ranking, fastest
from autofit.search.space import Space
from autofit.search.study import Limits, SearchOutcome, SearchProblem, search
from tests.search.proofs import rules_out


def run(problem: Any, trials: int = 40, **options: Any) -> Any:
    limits = Limits(trials=trials, memory_bytes=int(problem.budget))
    return search(problem.space, problem.problem(), limits=limits, **options)


def regret(problem: Any, measurements: Any) -> float:
    """How far the config recommended is from the best one, by their true speeds."""
    best = fastest(measurements)
    return 1 - (problem.speed(best.config) if best else 0) / problem.best()


def test_finds_a_fast_config_in_few_probes_where_random_search_does_not(formula: Any) -> None:
    ours, chance = [], []
    for seed in range(16):
        problem = formula(seed, share=(0.1, 0.2, 0.4, 0.8)[seed % 4], noise=0.02)
        ours.append(regret(problem, run(problem, 16, seed=seed).measurements))
        drawn = random.Random(seed).sample(problem.configs, 16)
        chance.append(
            regret(problem, [problem.probe(number, config) for number, config in enumerate(drawn)])
        )
    assert statistics.mean(ours) < 0.05
    assert max(ours) < 0.2
    assert statistics.mean(chance) > 4 * statistics.mean(ours)


def test_the_first_probe_is_the_most_frugal_and_fits(formula: Any) -> None:
    for seed in range(20):
        problem = formula(seed, share=0.1)
        first = run(problem, 1).measurements[0]
        assert first.fits
        assert first.config["micro_batch_size"] == 1
        assert first.config["activation_checkpointing"] == "full"


def test_what_ran_out_of_memory_rules_out_others_for_good(formula: Any) -> None:
    problem = formula(1, share=0.15)
    outcome = run(problem, 60)
    order = problem.problem().memory_order
    failed = [each for each in outcome.measurements if not each.fits]
    for miss in failed:
        later = outcome.measurements[miss.number + 1 :]
        assert not any(rules_out(miss.config, each.config, order) for each in later)
    measured = {each.config for each in outcome.measurements}
    dominated = [
        config
        for config in problem.configs
        if config not in measured and any(rules_out(miss.config, config, order) for miss in failed)
    ]
    assert outcome.skipped == {"predicted": 0, "dominated": len(dominated), "refused": 0}
    assert len(dominated) > 100


def test_refused_configs_are_never_proposed(formula: Any) -> None:
    problem = formula(2)
    problem.refuse = lambda config: "no such kernel" if config["attention"] == "eager" else None
    outcome = run(problem, 30)
    assert all(config["attention"] == "sdpa" for config in problem.probed)
    assert outcome.skipped["refused"] == outcome.space_size / 2


def test_nothing_is_measured_twice_and_numbers_are_consecutive(formula: Any) -> None:
    problem = formula(3)
    outcome = run(problem, 50)
    assert len(set(problem.probed)) == len(problem.probed) == 50
    assert [each.number for each in outcome.measurements] == list(range(50))
    assert [each.config for each in outcome.measurements] == problem.probed
    assert outcome.stopped_by == "trials"
    assert outcome.space_size == len(problem.configs)


def test_ends_when_the_space_is_exhausted(formula: Any) -> None:
    problem = formula(4, share=0.2)
    problem.space = Space(
        "small", "d", {**problem.space.knobs, "lora_rank": (8,), "attention": ("sdpa",)}
    )
    problem.configs = problem.space.configs(problem.problem().constraints)
    outcome = run(problem, 10_000)
    assert outcome.stopped_by == "space"
    assert len(outcome.measurements) + outcome.skipped["dominated"] == outcome.space_size
    best = fastest(outcome.measurements)
    assert best is not None
    assert problem.speed(best.config) == problem.best()


def test_a_space_that_is_refused_whole(formula: Any) -> None:
    problem = formula()
    problem.refuse = lambda config: "no"
    outcome = run(problem)
    assert outcome.stopped_by == "space"
    assert outcome.measurements == ()
    assert outcome.skipped["refused"] == outcome.space_size


def test_a_space_of_one_config(formula: Any) -> None:
    problem = formula()
    problem.space = Space(
        "one", "d", {knob: values[:1] for knob, values in problem.space.knobs.items()}
    )
    outcome = run(problem)
    assert (outcome.stopped_by, outcome.space_size, len(outcome.measurements)) == ("space", 1, 1)


def test_a_knob_fixed_to_null_at_rank_0(formula: Any) -> None:
    problem = formula()
    problem.space = Space("full", "d", {**problem.space.knobs, "lora_rank": (0,)})
    assert len(run(problem, 5).measurements) == 5
    assert all(config["lora_targets"] is None for config in problem.probed)


def test_the_time_limit_ends_it(formula: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, now = formula(), [100.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: now[0])

    def tick(number: int, config: Config) -> None:
        now[0] += 10

    problem.before = tick
    limits = Limits(trials=100, time_limit=35)
    outcome = search(problem.space, problem.problem(), limits=limits)
    assert outcome.stopped_by == "time"
    assert len(outcome.measurements) == 4


def test_one_config_is_measured_even_where_predicting_took_all_the_time(
    formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, now = formula(), [100.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: now[0])

    def predict(configs: Sequence[Config]) -> None:
        now[0] += 60

    outcome = search(
        problem.space, replace(problem.problem(), predict=predict), limits=Limits(time_limit=35)
    )
    assert (outcome.stopped_by, len(outcome.measurements)) == ("time", 1)


def test_a_probe_that_the_time_was_up_for_is_no_measurement_and_its_config_may_be_measured_later(
    tmp_path: Path, formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, now = formula(), [100.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: now[0])
    stopped: list[Config] = []

    def probe(number: int, config: Config, best: float | None) -> Measurement | None:
        now[0] += 10
        if now[0] < 130:
            return problem.probe(number, config)
        stopped.append(config)
        return None

    journal = Journal(tmp_path / "journal.log", {"model": "m"}, 1)
    asked = dataclasses.replace(problem.problem(), probe=probe)
    outcome = search(
        problem.space, asked, limits=Limits(trials=100, time_limit=25), journal=journal
    )
    assert outcome.stopped_by == "time"
    assert [each.config for each in outcome.measurements] == problem.probed
    assert len(problem.probed) == len(problem.finished) == 2
    assert len(stopped) == 1
    again = search(problem.space, problem.problem(), limits=Limits(trials=3), journal=journal)
    assert [each.config for each in again.measurements] == [*problem.probed[:2], *stopped]


@pytest.mark.parametrize(
    "limits", [{"trials": 0}, {"time_limit": 0}, {"time_limit": -1.0}, {"time_limit": float("nan")}]
)
def test_limits_that_allow_nothing_are_wrong(limits: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Limits(**limits)


def test_probes_hear_of_the_best_so_far_and_progress_is_told(formula: Any) -> None:
    problem = formula(5)
    outcome = run(problem, 20)
    assert [measurement for measurement, _ in problem.finished] == list(outcome.measurements)
    for number, (_, best) in enumerate(problem.finished):
        assert best == fastest(outcome.measurements[: number + 1])
        before = outcome.measurements[:number]
        kind = tier(outcome.measurements[number].config)
        rival = fastest(seen for seen in before if tier(seen.config) == kind)
        expected = math.inf if any(seen.fits for seen in before) else None
        if rival and rival.step_seconds:
            expected = rival.step_seconds.median
        assert problem.bests[number] == expected


def test_the_number_of_a_measurement_is_the_search_s_own(formula: Any) -> None:
    problem = formula()
    asked = problem.problem()
    careless = dataclasses.replace(
        asked, probe=lambda number, config, best: problem.probe(7, config)
    )
    outcome = search(problem.space, careless, limits=Limits(trials=3))
    assert [each.number for each in outcome.measurements] == [0, 1, 2]


def test_the_same_seed_makes_the_same_search(formula: Any) -> None:
    assert run(formula(6), 20, seed=1) == run(formula(6), 20, seed=1)


def test_an_interrupted_search_keeps_everything_and_is_resumed(
    tmp_path: Path, formula: Any
) -> None:
    journal = Journal(tmp_path / "journal.log", {"model": "m"})

    def interrupt(number: int, config: Config) -> None:
        if number == 7:
            raise KeyboardInterrupt

    problem, straight = formula(7), formula(7)
    problem.before = interrupt
    first = run(problem, 20, journal=journal)
    assert first.stopped_by == "interrupt"
    assert len(first.measurements) == 7

    problem.before = lambda number, config: None
    second = run(problem, 20, journal=journal)
    assert second.stopped_by == "trials"
    assert len(problem.probed) == len(set(problem.probed)) == 20
    # As if it had never been interrupted.
    assert second == run(straight, 20)
    # And a third time there is nothing left to do.
    assert run(problem, 20, journal=journal) == second
    assert len(problem.probed) == 20


def test_an_interrupt_while_progress_is_shown_keeps_that_measurement(formula: Any) -> None:
    problem = formula()

    def interrupt(measurement: Measurement, best: Measurement | None) -> None:
        raise KeyboardInterrupt

    outcome = search(problem.space, dataclasses.replace(problem.problem(), on_finished=interrupt))
    assert outcome.stopped_by == "interrupt"
    assert len(outcome.measurements) == 1


def test_an_error_of_the_probe_is_passed_on_and_the_journal_stays_good(
    tmp_path: Path, formula: Any
) -> None:
    journal = Journal(tmp_path / "journal.log")
    problem = formula()

    def break_down(number: int, config: Config) -> None:
        if number == 2:
            raise ProbeError("the child processes do not start.")

    problem.before = break_down
    with pytest.raises(ProbeError):
        run(problem, journal=journal)
    problem.before = lambda number, config: None
    assert len(run(problem, 4, journal=journal).measurements) == 4


def test_another_space_or_identity_is_not_resumed(tmp_path: Path, formula: Any) -> None:
    problem, path = formula(), tmp_path / "journal.log"
    run(problem, 2, journal=Journal(path, {"model": "a"}))
    with pytest.raises(InputError, match="model was 'a', is 'b'"):
        run(problem, 3, journal=Journal(path, {"model": "b"}))
    problem.space = Space("other", "d", {**problem.space.knobs, "precision": ("fp32",)})
    with pytest.raises(
        InputError, match=r"space.precision was \['bf16', 'bf16-mixed', 'fp32'\], is \['fp32'\]"
    ):
        run(problem, 3, journal=Journal(path, {"model": "a"}))


def test_optuna_stays_silent_and_gets_its_verbosity_back(
    formula: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.DEBUG)
    try:
        run(formula(), 3, journal=Journal(tmp_path / "journal.log"))
        assert optuna.logging.get_verbosity() == logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)
    assert capfd.readouterr() == ("", "")


def test_the_room_never_loads_torch() -> None:
    code = "import sys; from autofit.search.study import search; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(study_module.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


@pytest.mark.parametrize("predicted", [False, True])
def test_of_a_large_space_a_part_is_weighed(
    formula: Any, monkeypatch: pytest.MonkeyPatch, predicted: bool
) -> None:
    monkeypatch.setattr(study_module, "_MOST_SCORED", 40)
    problem = formula(5, share=0.3)
    asked = problem.problem()
    if predicted:
        seconds = [32 / problem.speed(config) for config in problem.configs]
        told = Predictions.of(problem.configs, list(map(problem.memory, problem.configs)), seconds)
        asked = dataclasses.replace(asked, predict=lambda configs: told)
    limits = Limits(trials=100, memory_bytes=int(problem.budget))
    outcome = search(problem.space, asked, limits=limits)
    assert outcome.stopped_by == "space"
    assert len(outcome.measurements) + outcome.skipped["dominated"] == 40
    assert outcome.space_size == len(problem.configs)
    if predicted:
        assert regret(problem, outcome.measurements) == 0
    else:
        probed = list(problem.probed)
        assert problem.configs[0] in probed
        assert [
            each.config for each in search(problem.space, asked, limits=limits).measurements
        ] == probed


def _expected(problem: Any) -> SearchProblem:
    """The problem of a formula that is predicted, but for a tenth of all speeds."""

    def expect(configs: Sequence[Config]) -> Predictions:
        seconds = [1.1 * 32 / problem.speed(config) for config in configs]
        return Predictions.of(configs, [problem.memory(config) for config in configs], seconds)

    return replace(problem.problem(), predict=expect)


def test_a_number_between_listed_values_is_measured_and_known_when_the_search_is_resumed(
    tmp_path: Path, formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process may find other numbers, or have no predictions."""
    problem = formula(3)
    too_large = [
        config
        for config in problem.configs
        if not problem.fits(config) and config.activation_checkpointing == "none"
    ]
    rest = max(too_large, key=problem.speed)
    memory, speed = problem.memory, problem.speed

    def is_between(config: Config) -> bool:
        return ":" in config["activation_checkpointing"]

    monkeypatch.setattr(
        problem,
        "memory",
        lambda config: 0.9 * problem.budget if is_between(config) else memory(config),
    )
    monkeypatch.setattr(
        problem, "speed", lambda config: 2 * speed(rest) if is_between(config) else speed(config)
    )

    def searched(numbers: Sequence[int], trials: int) -> SearchOutcome:
        def expect(configs: Sequence[Config]) -> Predictions:
            between = [rest.replace(activation_checkpointing=f"full:{each}") for each in numbers]
            known = [*configs, *between]
            seconds = [32 / problem.speed(config) for config in known]
            told = Predictions.of(known, list(map(problem.memory, known)), seconds)
            return replace(told, between=tuple(between))

        asked = replace(
            problem.problem(),
            predict=expect if numbers else lambda configs: None,
            between={"activation_checkpointing": [f"full:{each}" for each in range(1, 8)]},
        )
        limits = Limits(trials=trials, memory_bytes=int(problem.budget))
        return search(
            problem.space, asked, limits=limits, journal=Journal(tmp_path / "journal.log")
        )

    first = searched([3], 2)
    best = fastest(first.measurements)
    assert best is not None and best.config == rest.replace(activation_checkpointing="full:3")
    second = searched([5], 4)
    third = searched([], 6)
    assert second.measurements[:2] == first.measurements
    assert third.measurements[:4] == second.measurements
    assert len({each.config for each in third.measurements}) == 6


def test_a_config_beside_the_drawn_ones_is_measured_and_known_when_the_search_is_resumed(
    tmp_path: Path, formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its values are listed; the next process may find other ones around the best."""
    problem = formula(3)
    missed = max(filter(problem.fits, problem.configs), key=problem.speed)
    listed = Enumeration.configs
    monkeypatch.setattr(
        Enumeration,
        "configs",
        lambda self, seed=0: tuple(config for config in listed(self, seed) if config != missed),
    )

    def searched(others: tuple[Config, ...], trials: int) -> SearchOutcome:
        def expect(configs: Sequence[Config]) -> Predictions:
            known = [*configs, *others]
            seconds = [32 / problem.speed(config) for config in known]
            told = Predictions.of(known, list(map(problem.memory, known)), seconds)
            return replace(told, between=others)

        asked = replace(problem.problem(), predict=expect)
        limits = Limits(trials=trials, memory_bytes=int(problem.budget))
        return search(
            problem.space, asked, limits=limits, journal=Journal(tmp_path / "journal.log")
        )

    first = searched((missed,), 1)
    assert [seen.config for seen in first.measurements] == [missed]
    second = searched((), 5)
    assert second.measurements[0] == first.measurements[0]
    assert len({seen.config for seen in second.measurements}) == 5


def test_with_good_predictions_it_can_end_after_a_few_probes_and_says_what_it_may_have_missed(
    formula: Any,
) -> None:
    problem = formula(3, noise=0.02)
    limits = Limits(trials=100, memory_bytes=int(problem.budget), tolerance=0.1)
    outcome = search(problem.space, _expected(problem), limits=limits)
    assert outcome.stopped_by == "bound"
    assert len(outcome.measurements) < 15
    assert outcome.bound is not None
    assert outcome.bound > -1
    best = fastest(outcome.measurements)
    assert best is not None
    assert problem.speed(best.config) > problem.best() / 1.1

    few = search(problem.space, _expected(problem), limits=replace(limits, trials=1))
    assert few.stopped_by == "trials"
    assert few.bound is not None
    assert few.bound > outcome.bound


def test_predictions_that_are_many_times_off_say_nothing_unless_all_probes_are_off_alike(
    formula: Any,
) -> None:
    problem = formula(3, noise=0.02)
    limits = Limits(trials=8, memory_bytes=int(problem.budget))
    outcome = search(problem.space, _expected(problem), limits=limits)
    assert outcome.prediction_bias == 0.0
    surrogate = outcome.surrogate
    assert surrogate is not None
    fitting = [each for each in outcome.measurements if each.fits and each.step_seconds]
    left = np.array(
        [config not in {each.config for each in fitting} for config in surrogate.pool.configs]
    )

    def off(*factors: float) -> list[Measurement]:
        times = zip(fitting, itertools.cycle(factors), strict=False)
        return [each.taking(factor * each.step_seconds.median) for each, factor in times]

    assert surrogate.prediction_bias(off(6.0)) == 0.0
    assert surrogate.prediction_bias(off(6.0)[:4]) == pytest.approx(6 / 1.1, rel=0.1)
    for factors in ((4.0, 16.0), (1 / 4, 1 / 16)):
        assert surrogate.prediction_bias(off(*factors))
        assert surrogate.can_improve(off(*factors), left, 0.5)
        assert surrogate.regret_bound(off(*factors), left) == math.inf


@pytest.mark.parametrize("seed", range(4))
def test_before_it_ends_by_itself_it_finds_the_best_of_every_tier(formula: Any, seed: int) -> None:
    problem = formula(seed, share=0.7)
    limits = Limits(trials=100, memory_bytes=int(problem.budget), tolerance=0.1)
    outcome = search(problem.space, _expected(problem), limits=limits)
    assert outcome.stopped_by == "bound"
    assert len(outcome.measurements) < 25
    for kind in ("full", "lora"):
        best = fastest([each for each in outcome.measurements if tier(each.config) == kind])
        true = max(
            problem.speed(each)
            for each in problem.configs
            if tier(each) == kind and problem.fits(each)
        )
        assert best is not None
        assert problem.speed(best.config) > true / 1.1


def test_without_predictions_it_never_ends_by_itself(formula: Any) -> None:
    problem = formula(1)
    limits = Limits(trials=30, memory_bytes=int(problem.budget), tolerance=0.5)
    outcome = search(problem.space, problem.problem(), limits=limits)
    assert outcome.stopped_by == "trials"
    assert outcome.bound is None


def test_a_quick_search_ends_once_a_few_are_measured_and_one_fits(formula: Any) -> None:
    problem, limits = formula(1), Limits(trials=12, quick=2)
    found = search(problem.space, problem.problem(), limits=limits)
    assert (len(found.measurements), found.stopped_by) == (2, "trials")
    problem.budget = 0.9 * min(map(problem.memory, problem.configs))  # nothing fits
    assert len(search(problem.space, problem.problem(), limits=limits).measurements) > 2


@pytest.mark.parametrize("ranks", [(0,), (8, 16, 64)])
@pytest.mark.parametrize(("factor", "probes"), [(1.0, 1), (1.2, 1), (1.5, 2), (0.6, 2)])
def test_a_quick_search_ends_with_the_first_that_takes_as_long_as_predicted(
    formula: Any, factor: float, probes: int, ranks: tuple[int, ...]
) -> None:
    problem = formula(1, share=0.9)
    problem.space = Space("one tier", "d", {**problem.space.knobs, "lora_rank": ranks})

    def expect(configs: Sequence[Config]) -> Predictions:
        seconds = [factor * 32 / problem.speed(config) for config in configs]
        return Predictions.of(configs, [problem.memory(config) for config in configs], seconds)

    expected = replace(problem.problem(), predict=expect)
    limits = Limits(trials=12, memory_bytes=int(problem.budget), quick=2)
    found = search(problem.space, expected, limits=limits)
    assert (len(found.measurements), found.stopped_by) == (probes, "trials")
    assert len(search(problem.space, expected, limits=replace(limits, quick=None)).measurements) > 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("quick", "of_each"), [(None, 2), (2, 1)])
def test_every_tier_that_fits_is_seen_before_any_is_polished(
    formula: Any, seed: int, quick: int | None, of_each: int
) -> None:
    problem = formula(seed, share=0.9, noise=0.02)
    limits = Limits(memory_bytes=int(problem.budget), tolerance=0.03, quick=quick)
    outcome = search(problem.space, _expected(problem), limits=limits)
    for kind in ("full", "lora"):
        first = outcome.measurements[: 2 * of_each]
        assert sum(tier(seen.config) == kind for seen in first) == of_each
    assert not outcome.little_seen


def test_a_tier_of_which_little_was_seen_is_said_to_be(formula: Any) -> None:
    problem = formula(1, share=0.9)
    limits = Limits(trials=3, memory_bytes=int(problem.budget), tolerance=0.03)
    outcome = search(problem.space, _expected(problem), limits=limits)
    assert list(outcome.little_seen.values()) == [1]


def test_a_tier_that_only_fails_is_given_up(formula: Any) -> None:
    problem = formula(2, share=0.9)

    def failing(number: int, config: Config, best: float | None = None) -> Measurement:
        if tier(config) == "full":
            return Measurement(config, Outcome.FAILED, number, reason="it crashes")
        return problem.probe(number, config, best)  # type: ignore[no-any-return]

    limits = Limits(trials=30, memory_bytes=int(problem.budget), tolerance=0.03)
    outcome = search(problem.space, replace(_expected(problem), probe=failing), limits=limits)
    failed = [seen for seen in outcome.measurements if seen.outcome is Outcome.FAILED]
    assert 0 < len(failed) <= 6
    assert outcome.stopped_by == "bound"


def test_what_is_refused_uses_up_no_trials_but_does_not_go_on_for_ever(formula: Any) -> None:
    problem = formula(2, share=0.9)

    def refusing(number: int, config: Config, best: float | None = None) -> Measurement:
        if number < refused:
            return Measurement(config, Outcome.REFUSED, number, reason="no such kernel here")
        return problem.probe(number, config, best)  # type: ignore[no-any-return]

    given, limits = replace(problem.problem(), probe=refusing), Limits(trials=4)
    refused = 2
    assert len(search(problem.space, given, limits=limits).measurements) == 6
    refused = 100
    assert len(search(problem.space, given, limits=limits).measurements) == 8


def test_the_rule_of_the_answer_is_what_the_search_makes_large(formula: Any) -> None:
    """LoRA is faster by less than it must be, so that full training is polished."""
    problem = formula(1, share=0.9)
    ranking = Ranking(0.03, lambda config: (), PREFERENCES["balanced"])
    balanced = replace(_expected(problem), ranking=ranking)
    limits = Limits(memory_bytes=int(problem.budget), tolerance=0.03)
    outcome = search(problem.space, balanced, limits=limits)
    best = ranking.recommend(outcome.posterior)
    assert best is not None

    def merit(config: Config) -> float:
        return problem.speed(config) / ranking.objective.discount(config)

    fitting = filter(problem.fits, problem.configs)
    assert merit(best.config) > 0.95 * max(map(merit, fitting))


@pytest.mark.parametrize("seed", range(4))
def test_relatives_are_one_candidate_until_the_winner_s_are_compared(
    formula: Any, seed: int
) -> None:
    problem = formula(seed, share=0.9)

    def name(config: Config) -> Config:
        rank = 8 if config["lora_rank"] else 0
        return config.replace(optimizer="adamw", lora_rank=rank)

    limits = Limits(memory_bytes=int(problem.budget), tolerance=0.03)
    outcome = search(problem.space, _expected(problem), limits=limits)
    names = [name(seen.config) for seen in outcome.measurements if seen.fits]
    assert len(set(names)) >= len(names) - 1  # the winner's, at the end
    # Nearly as fast, and said to learn more: measured once nothing else is left to find.
    ranking = Ranking(0.5, lambda config: (int(str(config["lora_rank"])),))
    again = search(problem.space, replace(_expected(problem), ranking=ranking), limits=limits)
    best = ranking.recommend(again.posterior)
    assert best is not None
    assert best.config["lora_rank"] != 8


@pytest.mark.parametrize("seed", range(3))
def test_a_quick_search_goes_on_while_it_expects_another_config_to_be_much_faster(
    formula: Any, seed: int
) -> None:
    """The fastest ones are refused once they are built, which the predictions do not know."""
    problem = formula(seed, share=0.9)
    favourite = max(problem.configs, key=problem.speed)["optimizer"]

    def expect(configs: Sequence[Config]) -> Predictions:
        seconds = [32 / problem.speed(config) for config in configs]
        return Predictions.of(configs, [problem.memory(config) for config in configs], seconds)

    def refusing(number: int, config: Config, best: float | None = None) -> Measurement:
        if config["optimizer"] == favourite:
            return Measurement(
                config, Outcome.REFUSED, number, reason="the model says so while it is built"
            )
        return problem.probe(number, config, best)  # type: ignore[no-any-return]

    given = replace(problem.problem(), predict=expect, probe=refusing)
    limits = Limits(trials=12, memory_bytes=int(problem.budget), tolerance=0.1, quick=2)
    found = search(problem.space, given, limits=limits).measurements
    ran = [each for each in found if each.outcome is not Outcome.REFUSED]
    assert len(found) > len(ran) <= 6
    works = [
        config
        for config in problem.configs
        if config["optimizer"] != favourite and problem.fits(config)
    ]
    assert max(problem.speed(each.config) for each in ran if each.fits) > 0.85 * max(
        map(problem.speed, works)
    )


def test_what_is_refused_counts_for_nothing_in_a_quick_search(formula: Any) -> None:
    problem = formula(1, share=0.9)

    def refusing(number: int, config: Config, best: float | None = None) -> Measurement:
        if number == 1:
            return Measurement(
                config, Outcome.REFUSED, number, reason="the model says so while it is built"
            )
        return problem.probe(number, config, best)  # type: ignore[no-any-return]

    given = replace(problem.problem(), probe=refusing)
    found = search(problem.space, given, limits=Limits(trials=12, quick=2)).measurements
    assert [each.outcome for each in found[:3]] == [Outcome.FITS, Outcome.REFUSED, Outcome.FITS]
    assert {tier(each.config) for each in found} == {"full", "lora"}


def test_where_nothing_fits_or_nothing_is_left_there_is_no_bound(formula: Any) -> None:
    problem = formula()
    problem.space = Space(
        "one", "d", {knob: values[:1] for knob, values in problem.space.knobs.items()}
    )
    assert run(problem).bound is None
    nothing = formula(share=0.0)
    nothing.budget = 1.0
    assert run(nothing, 3).bound is None


@pytest.mark.parametrize(
    ("told", "least"), [(1.0, 3), (0.25, 20)], ids=["exactly", "far too little"]
)
def test_where_nothing_fits_a_few_that_should_need_least_confirm_what_is_predicted(
    formula: Any, told: float, least: int
) -> None:
    problem = formula(3)
    problem.budget = 0.6 * min(map(problem.memory, problem.configs))
    plain = _expected(problem).predict

    def expect(configs: Sequence[Config]) -> Predictions:
        known = plain(configs)
        return Predictions.of(
            configs, [told * known.nbytes[each] for each in configs], [1.0] * len(configs)
        )

    asked = replace(problem.problem(), predict=expect)
    limits = Limits(trials=20, memory_bytes=int(problem.budget), tolerance=0.02)
    outcome = search(problem.space, asked, limits=limits)
    assert not any(each.fits for each in outcome.measurements)
    assert len(outcome.measurements) == least
    assert outcome.stopped_by == ("bound" if least == 3 else "trials")


# What earlier searches measured


def _known(
    problem: Any, measurements: Sequence[Measurement], slower: float = 1.15
) -> list[PriorMeasurement]:
    """The measurements as the store hands them over on a day when the machine was slower."""
    budget = int(problem.budget)
    then = [
        each.taking(each.step_seconds.median * slower) if each.step_seconds else each
        for each in measurements
    ]
    found = [prior_measurement(each, 1, then=budget, now=budget, exact=True) for each in then]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_probe_is_of_the_best_that_is_known(
    formula: Any, seed: int, predicted: bool
) -> None:
    problem = formula(seed, noise=0.02)
    before = run(problem, 25, seed=seed).measurements
    known = fastest(before)
    asked = _expected(problem) if predicted else problem.problem()
    limits = Limits(trials=1, memory_bytes=int(problem.budget))
    found = search(
        problem.space, replace(asked, prior_measurements=_known(problem, before)), limits=limits
    ).measurements[0]
    assert known is not None
    assert found.fits
    assert problem.speed(found.config) > 0.95 * problem.speed(known.config)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_search_again_takes_few_probes(formula: Any, seed: int) -> None:
    problem = formula(seed, share=0.5, noise=0.02)
    limits = Limits(trials=100, memory_bytes=int(problem.budget), tolerance=0.1)
    first = search(problem.space, _expected(problem), limits=limits)
    known = replace(_expected(problem), prior_measurements=_known(problem, first.measurements))
    second = search(problem.space, known, limits=limits)
    assert (first.stopped_by, second.stopped_by) == ("bound", "bound")
    # one for each tier, and one in doubt
    assert len(second.measurements) <= 3
    assert regret(problem, second.measurements) < 0.1


def test_what_is_known_is_no_part_of_the_outcome_and_is_measured_again(formula: Any) -> None:
    problem = formula(2, noise=0.02)
    before = run(problem, 6).measurements
    problem.probed.clear()
    outcome = search(
        problem.space,
        replace(problem.problem(), prior_measurements=_known(problem, before, slower=2.0)),
        limits=Limits(trials=10, memory_bytes=int(problem.budget)),
    )
    assert [each.config for each in outcome.measurements] == problem.probed
    assert [each.number for each in outcome.measurements] == list(range(10))
    assert {each.config for each in before if each.fits} & set(problem.probed)
    assert {each.config for each in outcome.posterior} <= set(problem.probed)
    for each in outcome.posterior:  # by today's machine
        assert each.throughput == pytest.approx(problem.speed(each.config), rel=0.15)


def test_what_is_proven_not_to_fit_is_left_out_once_something_fits(formula: Any) -> None:
    problem = formula(1, share=0.15)
    before = run(problem, 60).measurements
    missed = [each.config for each in before if not each.fits]
    problem.probed.clear()
    asked = replace(problem.problem(), prior_measurements=_known(problem, before))
    outcome = search(
        problem.space, asked, limits=Limits(trials=20, memory_bytes=int(problem.budget))
    )
    order = problem.problem().memory_order
    first = next(each.number for each in outcome.measurements if each.fits)
    assert first == 0
    assert not any(rules_out(miss, config, order) for miss in missed for config in problem.probed)
    assert outcome.skipped["dominated"] >= len(missed)


def test_where_all_is_known_not_to_fit_the_nearest_miss_is_measured_again(formula: Any) -> None:
    problem = formula(3, share=0.0)
    problem.budget = 0.9 * min(map(problem.memory, problem.configs))
    before = run(problem, 3).measurements
    assert not any(each.fits for each in before)
    asked = replace(problem.problem(), prior_measurements=_known(problem, before))
    again = search(problem.space, asked, limits=Limits(trials=3, memory_bytes=int(problem.budget)))
    assert min(map(problem.memory, problem.probed[-3:])) == min(
        map(problem.memory, problem.configs)
    )
    assert again.skipped["dominated"] == run(problem, 3).skipped["dominated"]


def test_what_is_known_of_other_spaces_says_nothing(formula: Any) -> None:
    problem = formula(4)
    others = [config.replace(precision="fp8") for config in problem.configs[:20]]
    known = [
        PriorMeasurement(config, step_seconds=1e-6, peak_bytes=10**14, outgrew=True, proven=True)
        for config in others
    ]
    without = run(formula(4), 10)
    limits = Limits(trials=10, memory_bytes=int(problem.budget))
    assert (
        search(problem.space, replace(problem.problem(), prior_measurements=known), limits=limits)
        == without
    )


def test_what_was_seen_to_fit_is_weighed_whatever_is_predicted_of_it(
    formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "_MOST_SCORED", 5)
    problem = formula(5, share=0.9)

    def poorly(configs: Sequence[Config]) -> Predictions:
        """All much too large, and the fastest ones slow."""
        seconds = [problem.speed(config) for config in configs]
        return Predictions.of(configs, [3 * problem.budget for _ in configs], seconds)

    best = max((config for config in problem.configs if problem.fits(config)), key=problem.speed)
    known = _known(problem, [problem.probe(0, best)])
    asked = replace(problem.problem(), predict=poorly, prior_measurements=known)
    outcome = search(
        problem.space, asked, limits=Limits(trials=1, memory_bytes=int(problem.budget))
    )
    assert [each.config for each in outcome.measurements] == [best]


def test_a_journal_goes_on_with_what_is_known(tmp_path: Path, formula: Any) -> None:
    problem = formula(6, noise=0.02)
    asked = replace(
        problem.problem(), prior_measurements=_known(problem, run(formula(6), 20).measurements)
    )
    limits, journal = (
        Limits(trials=4, memory_bytes=int(problem.budget)),
        Journal(tmp_path / "journal.log"),
    )
    first = search(problem.space, asked, limits=limits, journal=journal)
    again = search(problem.space, asked, limits=replace(limits, trials=8), journal=journal)
    assert again.measurements[:4] == first.measurements
    assert again == search(problem.space, asked, limits=replace(limits, trials=8))
