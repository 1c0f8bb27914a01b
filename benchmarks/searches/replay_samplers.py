"""The samplers that a replay compares: autofit's, Optuna's, and tools that search the micro-batch alone.

`autofit-on` is autofit's search where it may not end by itself, `autofit-quick` the one of `--fast`.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)

from autofit import techniques
from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.result import tier
from autofit.search import verification
from autofit.search.concurrency import Concurrency, Probe
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, prior_measurement
from autofit.search.ranking import BY_SPEED, Measurements, Ranking
from autofit.search.space import Space
from autofit.search.study import Limits, SearchOutcome, SearchProblem, search
from autofit.search.verification import confirm, verify
from autofit.tuning.measured import FAST_PROBES, FAST_TOLERANCE
from benchmarks.record_table import Row

_TOLERANCE = 0.03  # autofit's default
_SLOWER = 1.15  # on the day of what is known beforehand
_ASKED = 50  # times as often as there are probes: samplers that know no rules propose the same config again and again
ALL = "all"  # tiers
_ASKED_SLOW = 3  # the same of a sampler that takes a second to propose one
AGAIN = "seconds_again"  # of a probe, where the same config was measured before
_POPULATION = 10  # of NSGA-II, whose default of 50 would be random over as few probes as these


@dataclass(frozen=True)
class Problem:
    """The best config of a table within a budget of bytes, to be found.

    Attributes:
        samples: of a step.
        ranking: what is best, and which of those that are as good is handed out.
    """

    space: Space
    constraints: Constraints
    expected: Predictions
    rows: Mapping[Config, Row]
    budget: int
    samples: int
    ranking: Ranking = BY_SPEED

    def fits(self, row: Row) -> bool:
        """Whether it was measured, and within the budget."""
        return bool(row.step_seconds and row.peak_bytes and row.peak_bytes <= self.budget)

    def throughput(self, config: Config) -> float:
        """Samples per second by the median of all probes."""
        return self.samples / (self.rows[config].step_seconds or float("inf"))

    def merit(self, config: Config) -> float:
        """That throughput, discounted as the objective says."""
        return self.throughput(config) / self.ranking.objective.discount(config)

    @property
    def best(self) -> float:
        """The highest merit that fits."""
        return max(self.best_of_tiers.values())

    @functools.cached_property
    def best_of_tiers(self) -> dict[str, float]:
        """The highest merit that fits, by tier; without tiers of which nothing does."""
        best: dict[str, float] = {}
        for config, row in self.rows.items():
            if self.fits(row):
                name = tier(config)
                best[name] = max(best.get(name, 0.0), self.merit(config))

        return best

    def measure(
        self, config: Config, number: int, chance: random.Random, *, again: bool = False
    ) -> Measurement:
        """One of the table's probes of a config, as a search with this budget would have seen it.

        Args:
            again: it was measured before, which may have left something that makes it sooner.
        """
        row = self.rows[config]
        drawn = chance.choice([each for each in row.probes if each["step_seconds"]] or row.probes)
        begun = drawn["build_seconds"] + drawn["warmup_seconds"]
        if not self.fits(row):
            outcome = Outcome.OUT_OF_MEMORY if row.step_seconds else row.outcome or Outcome.FAILED
            return Measurement(
                config, outcome, number, peak_bytes=PeakBytes(row.peak_bytes or 0), seconds=begun
            )
        steps = StepSeconds(**drawn["step_seconds"])
        return Measurement(
            config,
            Outcome.FITS,
            number,
            step_seconds=steps,
            samples_per_second=self.samples / steps.median,
            peak_bytes=PeakBytes(row.peak_bytes or 0),
            seconds=drawn.get(AGAIN, drawn["seconds"]) if again else drawn["seconds"],
        )


@dataclass
class Replay:
    """One search: what it saw, in order. A config that is asked for again costs nothing and tells nothing new.

    `finals` came after those, of configs measured before. `ended` says at which second each of either ended, with as
    many `workers` before the finals, each as fast as if it were alone; `blind`: nothing is predicted. `leaders` are
    what it would return after each probe, if that is not just the best that it measured; `bound` is how much faster,
    as a share, it said that any other can be. `expect` gives what it expects of the configs that it measured to fit.
    """

    problem: Problem
    chance: random.Random
    most: int
    known: tuple[PriorMeasurement, ...] = ()
    workers: int = 1
    blind: bool = False
    seen: list[Measurement] = field(default_factory=list)
    finals: list[Measurement] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    leaders: list[Config | None] = field(default_factory=list)
    bound: float | None = None
    expect: Callable[[Measurements], Measurements] = lambda seen: seen

    @property
    def is_over(self) -> bool:
        return len(self.seen) >= self.most

    def probe(self, config: Config) -> Measurement:
        """Measure, if it was not yet."""
        known = next((each for each in self.seen if each.config == config), None)
        if known is None:
            known = self.problem.measure(config, len(self.seen), self.chance)
            self.seen.append(known)
            self._spend(known.seconds)
        return known

    def again(self, finalist: Measurement) -> Measurement:
        """Measure what was measured before."""
        seen = self.problem.measure(finalist.config, finalist.number, self.chance, again=True)
        self.finals.append(seen)
        self._spend(seen.seconds)
        rounds: verification.Rounds = {}
        for each in self.finals:
            rounds.setdefault(each.config, []).append(each)
        best = self.problem.ranking.recommend(verification.passed(rounds))
        self.leaders.append(best.config if best else self.leaders[-1])
        return seen

    def _spend(self, seconds: float) -> None:
        self.ended.append(seconds + (self.ended[-1] if self.ended else 0.0))


class SimulatedProbes:
    """Probes at the same time that finish in the order of the seconds that the table holds of them."""

    def __init__(self, probe: Probe, places: int) -> None:
        self.places, self.now = places, 0.0
        self._probe = probe
        self._running: list[tuple[float, int, Measurement]] = []

    def submit(self, number: int, config: Config, best_seconds: float | None) -> None:
        seen = self._probe(number, config, best_seconds)
        heapq.heappush(self._running, (self.now + seen.seconds, number, seen))

    def wait(self) -> tuple[int, Measurement]:
        self.now, number, seen = heapq.heappop(self._running)
        return number, seen

    def shutdown(self) -> list[tuple[int, Measurement]]:
        return []


def replay(
    name: str,
    problem: Problem,
    seed: int,
    probes: int,
    *,
    known: int = 0,
    workers: int = 1,
    blind: bool = False,
) -> Replay:
    """A search by the sampler of that name; autofit's with so many workers, so many measurements of an earlier search,
    and without predictions if `blind`."""
    run = Replay(problem, random.Random(seed), probes, workers=workers, blind=blind)
    if known:
        run.known = _of_an_earlier_day(problem, seed, known)
    SAMPLERS[name](run, seed)
    return run


def _of_an_earlier_day(problem: Problem, seed: int, count: int) -> tuple[PriorMeasurement, ...]:
    """What a search of autofit's would have left in the store that measured so many, when the machine was slower."""
    run = Replay(problem, random.Random(f"before {seed}"), count)
    _autofit(run, seed, tolerance=None)
    seen = [
        each.taking(each.step_seconds.median * _SLOWER) if each.step_seconds else each
        for each in run.seen
    ]
    known = [
        prior_measurement(each, 1, then=problem.budget, now=problem.budget, exact=True)
        for each in seen
    ]
    return tuple(each for each in known if each is not None)


def handed_out(run: Replay, probes: int | None) -> dict[str, Config]:
    """What a search hands out that ends after so many probes, None for all, finals included: by tier, and of `ALL`."""
    ranking = run.problem.ranking
    seen = run.seen[:probes]
    fitting = [measurement for measurement in run.expect(seen) if measurement.fits]

    def again(finalist: Measurement) -> Measurement:
        return run.problem.measure(finalist.config, finalist.number, run.chance)

    finals = verify(seen, fitting, again, ranking)
    answers = {}
    for name, answer in ranking.best_of_tiers(finals.of_tiers(elsewhere=False)).items():
        if answer:
            answers[name] = answer.config

    best = ranking.recommend(finals.candidates())
    if best:
        answers[ALL] = best.config
        answers[tier(best.config)] = best.config

    return answers


def answer_regrets(run: Replay, probes: int | None) -> dict[str, float]:
    """How much worse what is handed out is than the best that fits, as a share: of each tier of
    which anything fits, and of `ALL`; 1 where nothing is handed out."""
    problem = run.problem
    answers = handed_out(run, probes)
    regrets = {}
    for name, best in {ALL: problem.best, **problem.best_of_tiers}.items():
        merit = problem.merit(answers[name]) if name in answers else 0.0
        regrets[name] = 1 - merit / best

    return regrets


def _autofit(run: Replay, seed: int, tolerance: float | None = _TOLERANCE) -> None:
    found = _explored(run, seed, tolerance)
    if tolerance is not None:
        verify(found.measurements, found.posterior, run.again, run.problem.ranking)


def _quickly(run: Replay, seed: int) -> None:
    found = _explored(run, seed, FAST_TOLERANCE, FAST_PROBES)
    confirm(found.measurements, found.posterior, run.again, run.problem.ranking)


def _explored(
    run: Replay, seed: int, tolerance: float | None, quick: int | None = None
) -> SearchOutcome:
    problem, started = run.problem, []

    def concurrently(probe: Probe) -> Concurrency:
        started.append(SimulatedProbes(probe, run.workers))
        return started[0]

    def finished(measured: Measurement, best: Measurement | None) -> None:
        run.seen.append(measured)
        run.ended.append(started[0].now)
        run.leaders.append(best.config if best else None)

    def probe(number: int, config: Config, best: float | None) -> Measurement:
        again = any(seen.config == config for seen in run.seen)
        return problem.measure(config, number, run.chance, again=again)

    asked = SearchProblem(
        probe=probe,
        constraints=problem.constraints,
        memory_order=lambda knob, value: techniques.technique_named(knob).memory_order(value),
        on_finished=finished,
        predict=lambda configs: None if run.blind else problem.expected,
        prior_measurements=run.known,
        concurrency=concurrently,
        ranking=problem.ranking,
    )
    limits = Limits(run.most, memory_bytes=problem.budget, tolerance=tolerance, quick=quick)
    found = search(problem.space, asked, limits=limits, seed=seed)
    run.bound = found.bound
    if found.surrogate:
        run.expect = found.surrogate.posterior
    return found


def _by_estimate(run: Replay, seed: int) -> None:
    """In the order of predicted merit, those that should fit before the others, which come smallest first."""
    problem = run.problem
    configs = list(problem.rows)
    nbytes, speed = problem.expected.log_bytes(configs), problem.expected.log_throughput(configs)
    speed = speed - np.log([problem.ranking.objective.discount(config) for config in configs])
    too_large = [problem.expected.nbytes[config] > problem.budget for config in configs]
    order = sorted(
        range(len(configs)),
        key=lambda at: (too_large[at], nbytes[at] if too_large[at] else -speed[at]),
    )
    for at in order[: run.most]:
        run.probe(configs[at])


def _optuna(
    make: Callable[[int], BaseSampler], *, filtered: bool = False, asked: int = _ASKED
) -> Callable[[Replay, int], None]:
    """A search by a sampler of Optuna's.

    Args:
        filtered: what the estimator excludes costs no probe.
        asked: times as often as there are probes, at most.
    """

    def run_it(run: Replay, seed: int) -> None:
        problem = run.problem
        space = {
            knob: CategoricalDistribution(values) for knob, values in problem.space.knobs.items()
        }
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize", sampler=make(seed))
        for _ in range(asked * run.most):
            trial = study.ask(space)
            config = _config(problem, trial.params)
            excluded = (
                filtered and config and problem.expected.surely_exceeds(config, problem.budget)
            )
            seen = run.probe(config) if config and not excluded else None
            trial.set_constraint(
                "memory", -1.0 if seen and seen.fits else _overshoot(problem, config, seen)
            )
            merit = problem.ranking.value(seen) if seen else 0.0
            study.tell(trial, merit)
            if run.is_over:
                return

    return run_it


def _overshoot(problem: Problem, config: Config | None, seen: Measurement | None) -> float:
    """How far above the budget, as a share of it; 1 for what cannot be."""
    peak = seen.peak_bytes.allocated if seen and seen.peak_bytes else 0
    nbytes = peak or (problem.expected.nbytes[config] if config else 0)
    return max(nbytes / problem.budget - 1, 1e-3) if nbytes else 1.0


def _config(problem: Problem, knobs: Mapping[str, Any]) -> Config | None:
    try:
        config = problem.constraints.canonical(knobs)
    except InputError:
        return None
    return config if config in problem.rows else None


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(multivariate=True, seed=seed)


def _at_defaults(run: Replay) -> dict[int, Config]:
    """By micro-batch, the configs that change nothing else: every other knob at its last value, which does least."""
    problem = run.problem
    last = {knob: values[-1] for knob, values in problem.space.knobs.items()} | _DEFAULTS
    sizes = problem.space.knobs["micro_batch_size"]
    known = {knob: value for knob, value in last.items() if knob in problem.space.knobs}
    found = {
        int(size): _config(problem, {**known, "micro_batch_size": size}) for size in sizes if size
    }
    return {size: config for size, config in found.items() if config}


_DEFAULTS = {
    "precision": "fp32",
    "lora_rank": 0,
    "optimizer": "adamw",
    "optimizer_in_backward": False,
}


def _doubling(run: Replay, seed: int) -> None:
    """From the smallest micro-batch, twice as large until one runs out of memory (Lightning's `scale_batch_size`)."""
    for _, config in sorted(_at_defaults(run).items()):
        if not run.probe(config).fits:
            return


def _halving(run: Replay, seed: int) -> None:
    """From the whole batch, half as large until one fits (accelerate's `find_executable_batch_size`)."""
    for _, config in sorted(_at_defaults(run).items(), reverse=True):
        if run.probe(config).fits:
            return


QUICK = "autofit-quick"
AUTOFIT = ("autofit", "autofit-on", QUICK)  # those that can have several workers
SAMPLERS: dict[str, Callable[[Replay, int], None]] = {
    "autofit": _autofit,
    "autofit-on": functools.partial(_autofit, tolerance=None),
    QUICK: _quickly,
    "by-estimate": _by_estimate,
    "tpe": _optuna(_tpe),
    "tpe-filtered": _optuna(_tpe, filtered=True),
    "gp-filtered": _optuna(lambda seed: GPSampler(seed=seed), filtered=True, asked=_ASKED_SLOW),
    "nsga2": _optuna(lambda seed: NSGAIISampler(population_size=_POPULATION, seed=seed)),
    "random": _optuna(lambda seed: RandomSampler(seed=seed)),
    "doubling": _doubling,
    "halving": _halving,
}
