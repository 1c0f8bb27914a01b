"""The search: ask the sampler for a config, have it measured, learn from it, until a limit is
reached. It knows nothing of models, devices or techniques: the tuning room hands over functions,
the `SearchProblem`."""

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.study import Study
from optuna.trial import Trial, TrialState

from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement, Outcome, that_fit
from autofit.core.result import of_tier, tier
from autofit.search.concurrency import Concurrency, Probe, Threaded
from autofit.search.drift import slowdown
from autofit.search.encoding import Configs, KnobValues
from autofit.search.enumeration import Enumeration
from autofit.search.finals import Explored, Finals
from autofit.search.journal import (
    SPACE,
    Journal,
    identity_of_space,
    measured_configs,
    open_study,
    record,
)
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, PriorMeasurements
from autofit.search.pruning import MemoryOrder
from autofit.search.ranking import BY_SPEED, Measurements, Ranking, fastest
from autofit.search.sampler import SurrogateSampler, measurements_of
from autofit.search.space import Space
from autofit.search.surrogate import SPEED_NOISE, Surrogate

# Before each probe the whole pool is scored: 0.2 s for 50,000 configs, up to 1 s and half a GiB for
# 230,000. On synthetic problems with poor predictions the whole space found better configs in two
# of six searches, never worse.
_MOST_SCORED = 50_000
# Without predictions, the share of all trials that may run at once, and how many always may. On the
# recorded tables 107 of 108 searches of 16 gangs came within 2 % of the best; with 0.35 or 0.45 of
# the trials nine of ten did.
_AT_ONCE = 0.25
_FEW = 4
# Of each tier that fits, so many configs that fit are measured before any tier is polished; a quick
# search measures one of each.
_OF_EACH_TIER = 2
_MOST_REFUSED = 2  # times the number of trials: a search ends that meets nothing but refusals


@dataclass(frozen=True)
class SearchProblem:
    """The functions and facts that a search is given.

    Attributes:
        probe: gets a number, a config, and the seconds per step of the best so far, to stop
            hopeless ones.
        constraints: which configs of the space are legal.
        memory_order: the proven rank of a knob's value (`Technique.memory_order`).
        on_finished: gets each measurement, and the best one that fits so far.
        on_started: gets the size of the space and how many configs are refused, before the first
            probe.
        predict: gets all legal configs; None where nothing can be predicted.
        between: by knob the values beside the space's that configs may have which predictions add.
        prior_measurements: guide the first probes, and are no part of the outcome.
        on_probe: called as each probe starts.
        concurrency: makes of `probe` what runs it, several at a time or not.
        ranking: which config is recommended, and by what objective.
    """

    probe: Probe
    constraints: Constraints
    memory_order: MemoryOrder
    on_finished: Callable[[Measurement, Measurement | None], None]
    on_started: Callable[[int, int], None] = lambda size, refused: None
    predict: Callable[[Configs], Predictions | None] = lambda configs: None
    between: KnobValues = field(default_factory=dict)
    prior_measurements: Sequence[PriorMeasurement] = ()
    on_probe: Callable[[int, Config], None] = lambda number, config: None
    concurrency: Callable[[Probe], Concurrency] = Threaded
    ranking: Ranking = BY_SPEED


@dataclass(frozen=True)
class Limits:
    """When a search ends, and the memory it searches within.

    Attributes:
        trials: finished measurements but those that were refused, resumed ones included.
        time_limit: seconds, of this process only.
        memory_bytes: what tensors may take (`Budget.cap_bytes`).
        context_bytes: of a card's context, which is not part of that; None on a CPU.
        tolerance: the search also ends once no config left is expected to beat the best, nor the
            best of its tier, by more than this share.
        quick: measurements that suffice once one of each tier fits, or else those that take as long
            as predicted, unless another config is still expected to be much better; no tier's best
            is searched for then.
        latest: seconds until it ends also where nothing is measured: a late answer beats none.
        asked_seconds: the time limit as it was asked for, whatever is left of it: asked the same, a
            finished search gives its answer.
    """

    trials: int = 40
    time_limit: float | None = None
    memory_bytes: int | None = None
    context_bytes: int | None = None
    tolerance: float | None = None
    quick: int | None = None
    latest: float = math.inf
    asked_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(
                f"{self.trials} trials measure nothing.",
                "Give a number of trials of at least 1.",
            )

        seconds = self.time_limit
        if seconds is not None and not 0 < seconds < math.inf:
            raise InputError(
                f"the time limit must be positive, not {seconds}.",
                "Leave it out for none.",
            )

    def asked(self) -> dict[str, Any]:
        """What decides when the search ends."""
        return {
            "trials": self.trials,
            "tolerance": self.tolerance,
            "quick": self.quick,
            "asked_seconds": self.asked_seconds,
        }


@dataclass(frozen=True)
class SearchOutcome:
    """All measurements by number, why there are no more, and the surrogate to ask with them.

    Attributes:
        measurements: resumed ones included, verified ones not.
        skipped: configs never measured: predicted not to fit, dominated by an out-of-memory,
            refused.
        stopped_by: "trials", "time", "interrupt", "space" (none left) or "bound" (none is expected
            to be faster, or to fit).
        space_size: how many canonical configs there are, refused ones included.
        bound: the share by which any config left may be faster than the best, at 95 %; None where
            none is left or nothing fits.
        posterior: every config that fits, at the speed expected given all measurements.
        slowdown: the largest share by which the machine was slower or faster than at the end, by
            repeats.
        little_seen: of each tier that may have more to offer, how few probes fit.
        prediction_bias: how many times longer than predicted steps take, where predictions may
            mislead; else 0.
        finals: where to keep what is verified.
    """

    measurements: tuple[Measurement, ...]
    skipped: dict[str, int]
    stopped_by: str
    space_size: int
    bound: float | None = None
    posterior: tuple[Measurement, ...] = ()
    slowdown: float = 0.0
    little_seen: Mapping[str, int] = field(default_factory=dict)
    prediction_bias: float = 0.0
    surrogate: Surrogate | None = field(default=None, compare=False, repr=False)
    finals: Finals | None = field(default=None, compare=False, repr=False)


def search(
    space: Space,
    problem: SearchProblem,
    *,
    limits: Limits | None = None,
    journal: Journal | None = None,
    seed: int = 0,
) -> SearchOutcome:
    """Measure configs of a space until a limit or an interrupt.

    Each is measured once, but for a leader that is repeated to see the machine drift. Raises
    InputError where the space contradicts itself, or the journal cannot be continued.

    Args:
        limits: when to end, and the memory; the default limits if None.
        journal: where to keep the search; in memory if None.
        seed: decides between configs of the same score, and which of a large space are scored.
    """
    began = time.monotonic()
    limits = limits or Limits()
    deadline = began + (limits.time_limit or math.inf)

    enumeration = Enumeration(space.knobs, problem.constraints)
    legal = enumeration.configs(seed)
    size = enumeration.count(refused=True).configs
    refused = size - enumeration.count().configs
    problem.on_started(size, refused)

    predictions = problem.predict(legal) if len(legal) > 1 else None
    others = dict.fromkeys(predictions.between if predictions is not None else ())
    if journal is not None:
        others |= dict.fromkeys(measured_configs(journal.path))
    drawn = set(legal)
    legal = (*legal, *(config for config in others if config not in drawn))
    prior = _within(problem.prior_measurements, legal)
    possible = legal
    if predictions is not None and limits.memory_bytes is not None:
        possible = _possible(legal, predictions, limits.memory_bytes, prior.fits)

    scored = _worth_scoring(possible, predictions, limits.memory_bytes, seed)
    surrogate = Surrogate(
        _values(space, legal),
        _with_fitting(scored, legal, prior.fits),
        memory_order=problem.memory_order,
        memory_bytes=limits.memory_bytes,
        context_bytes=limits.context_bytes,
        predictions=predictions,
        prior=prior,
        objective=problem.ranking.objective,
    )

    sampler = SurrogateSampler(
        surrogate,
        seed=seed,
        between=problem.between,
        tolerance=limits.tolerance,
        ranking=problem.ranking,
        of_each_tier=_OF_EACH_TIER if limits.quick is None else 1,
        polishes_tiers=limits.quick is None,
        time_left=lambda: deadline - time.monotonic(),
    )

    with _quiet():
        if journal is not None:  # Optuna's parameters cannot change their choices
            knobs = identity_of_space(space.knobs, problem.between)
            identity = {**journal.identity, SPACE: knobs}
            journal = dataclasses.replace(journal, identity=identity)
        study = open_study(journal, sampler)
        asked = {**limits.asked(), "objective": repr(problem.ranking.objective)}
        finals = Finals(study, asked, measurements_of(study))
        explored = finals.explored
        if explored is None:
            stopped_by = _Exploration(study, sampler, problem, limits, began=began).run()
            explored = _explored(sampler, measurements_of(study), stopped_by)
            if stopped_by != "interrupt" and explored.measurements:
                finals.begin(explored)
        measurements = measurements_of(study)

    measured = {measurement.config for measurement in measurements}
    unmeasured = sum(config not in measured for config in surrogate.pool.configs)
    slower = abs(slowdown(measurements, noise=SPEED_NOISE)).max(initial=0.0)
    return SearchOutcome(
        tuple(measurements),
        skipped={
            "predicted": len(legal) - len(possible),
            "dominated": unmeasured - int(sampler.left(measurements).sum()),
            "refused": refused,
        },
        stopped_by=explored.stopped_by,
        space_size=size,
        bound=explored.bound,
        posterior=explored.posterior(measurements),
        slowdown=math.expm1(float(slower)),
        little_seen=sampler.little_seen(measurements),
        prediction_bias=surrogate.prediction_bias(measurements),
        surrogate=surrogate,
        finals=finals,
    )


def _within(measurements: Sequence[PriorMeasurement], legal: Configs) -> PriorMeasurements:
    """Earlier measurements of configs in this space; others have no prediction to compare with."""
    if not measurements:
        return PriorMeasurements()

    same = dict(zip(legal, legal, strict=True))  # looking up the same object is faster
    within = []
    for measurement in measurements:
        config = same.get(measurement.config)
        if config is not None:
            within.append(dataclasses.replace(measurement, config=config))

    return PriorMeasurements(within)


def _possible(
    legal: tuple[Config, ...],
    predictions: Predictions,
    memory_bytes: int,
    fitting: set[Config],
) -> tuple[Config, ...]:
    """The configs that are not predicted to need far too much memory.

    All where none would remain: predictions prove nothing.
    """
    exceeds = predictions.surely_exceeds
    possible = [config for config in legal if not exceeds(config, memory_bytes)]
    return tuple(_with_fitting(possible or legal, legal, fitting))


def _with_fitting(
    chosen: Configs,
    legal: Configs,
    fitting: set[Config],
) -> Configs:
    """The chosen configs and those already measured to fit, whatever is predicted of them.

    They come in the order of the legal ones.
    """
    if not fitting or len(chosen) == len(legal):
        return chosen

    wanted = fitting.union(chosen)
    return [config for config in legal if config in wanted]


def _worth_scoring(
    configs: Configs,
    predictions: Predictions | None,
    memory_bytes: int | None,
    seed: int,
) -> Configs:
    """As many configs as the sampler can score before each probe: the most promising ones.

    Without predictions a random sample with the first config, which should need the least memory.
    """
    if len(configs) <= _MOST_SCORED:
        return configs
    if predictions is not None:
        return predictions.most_promising(configs, memory_bytes or math.inf, _MOST_SCORED)

    draw = random.Random(seed)
    others = draw.sample(range(1, len(configs)), _MOST_SCORED - 1)
    return list(map(configs.__getitem__, sorted([0, *others])))


def _values(space: Space, legal: Configs) -> KnobValues:
    """Every value of each knob: the listed ones, then canonical ones that they lead to."""
    values = {}
    for knob, listed in space.knobs.items():
        known = dict.fromkeys(listed)
        known.update(dict.fromkeys(config[knob] for config in legal))
        values[knob] = tuple(known)

    return values


def _explored(
    sampler: SurrogateSampler,
    measurements: Measurements,
    stopped_by: str,
) -> Explored:
    """What exploring ended with."""
    left = sampler.left(measurements)
    bound = None
    if left.any():
        bound = sampler.surrogate.regret_bound(measurements, left)
        if not math.isfinite(bound):
            bound = None

    expected = {}
    for measurement in sampler.surrogate.posterior(measurements):
        if measurement.step_seconds:
            expected[str(measurement.number)] = measurement.step_seconds.median

    return Explored(len(measurements), stopped_by, bound, expected)


def _probes(measurements: Measurements) -> int:
    """How many of the trials are used up: what was refused says nothing, and does not count."""
    return sum(seen.outcome is not Outcome.REFUSED for seen in measurements)


class _Exploration:
    """Measures configs, as many at a time as there are places, until something stops it."""

    def __init__(
        self,
        study: Study,
        sampler: SurrogateSampler,
        problem: SearchProblem,
        limits: Limits,
        *,
        began: float,
    ) -> None:
        self._study = study
        self._sampler = sampler
        self._surrogate = sampler.surrogate
        self._problem = problem
        self._limits = limits
        self._deadline = began + (limits.time_limit or math.inf)
        self._latest = began + limits.latest
        self._probes = problem.concurrency(problem.probe)
        self._running: dict[int, Trial] = {}  # by the number of its measurement
        self._was_cut_short = False  # a probe, since the time was up

    def run(self) -> str:
        """Measure; returns what stopped it."""
        try:
            while True:
                stopped_by = self._fill_places()
                if not self._running:
                    assert stopped_by, "it goes on until there is a reason to stop"
                    return stopped_by

                measurement = self._record(*self._probes.wait())
                if measurement:
                    leader = self._surrogate.leader(measurements_of(self._study))
                    self._problem.on_finished(measurement, leader)
        except KeyboardInterrupt:
            return "interrupt"
        finally:
            self._end()

    def _fill_places(self) -> str | None:
        """Start probes until no more may run at once.

        Returns the reason to start no more, if there is one.
        """
        while len(self._running) < self._places():
            stopped_by = self._stop_reason()
            if stopped_by:
                return stopped_by
            self._start()

        return None

    def _places(self) -> int:
        """How many probes may run at once: without predictions few enough that later ones learn
        from the first."""
        if self._surrogate.informed:
            return self._probes.places
        return min(self._probes.places, max(_FEW, int(_AT_ONCE * self._limits.trials)))

    def _stop_reason(self) -> str | None:
        """Why no further probe starts now; the results of running ones may change it."""
        running = self._sampler.running(self._study)
        measurements = self._sampler.with_running(measurements_of(self._study), running)
        if not self._sampler.left(measurements).any():
            return "space"
        if _probes(measurements) >= self._limits.trials or self._is_quickly_done(measurements):
            return "trials"
        if len(measurements) >= _MOST_REFUSED * self._limits.trials:
            return "trials"
        if self._sampler.acquisition_target(measurements) is None:
            return "bound"

        end = self._deadline if measurements else self._latest
        if self._was_cut_short or time.monotonic() >= end:
            return "time"
        return None

    def _is_quickly_done(self, measurements: Measurements) -> bool:
        """Whether a quick search has measured enough."""
        quick = self._limits.quick
        if quick is None or not that_fit(measurements):
            return False

        if self._sampler.little_seen(measurements):
            return False

        if self._sampler.expects_much_better(measurements):
            return False
        return _probes(measurements) >= quick or self._surrogate.confirmed_by(measurements)

    def _start(self) -> None:
        """Have the next config measured, under the first number that is free."""
        measurements = measurements_of(self._study)
        taken = {measurement.number for measurement in measurements}.union(self._running)
        number = next(number for number in itertools.count() if number not in taken)

        trial = self._study.ask(self._sampler.distributions)
        self._running[number] = trial
        config = self._sampler.config(trial.params)
        self._problem.on_probe(number, config)

        self._probes.submit(number, config, self._seconds_to_beat(measurements, config))

    def _seconds_to_beat(self, measurements: Measurements, config: Config) -> float | None:
        """Seconds of a step with which a config is as good as the best of its tier.

        None until something fits. No other tier ends its probes, so that none is named by a bad
        one.
        """
        if not that_fit(measurements):
            return None

        objective = self._problem.ranking.objective
        rivals = of_tier(tier(config), measurements)
        best = fastest(rivals, objective)
        if best is None or best.step_seconds is None:
            return math.inf

        ahead = objective.discount(best.config) / objective.discount(config)
        return best.step_seconds.median * max(ahead, 1.0)

    def _record(self, number: int, measurement: Measurement | None) -> Measurement | None:
        """Keep what a probe gave; None: its time was up before it ended."""
        trial = self._running[number]
        if measurement is None:
            self._was_cut_short = True
            self._abandon(trial)
        else:
            measurement = dataclasses.replace(measurement, number=number)
            record(self._study, trial, measurement)

        del self._running[number]
        return measurement

    def _end(self) -> None:
        """Record the probes that have just finished, abandon those that still run."""
        try:
            for number, measurement in self._probes.shutdown():
                self._record(number, measurement)
        finally:
            for trial in self._running.values():
                self._abandon(trial)

    def _abandon(self, trial: Trial) -> None:
        """Nothing happens after `record`; a config that was never measured may be chosen again."""
        self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, which reports every trial to stderr; the user's own studies get their
    verbosity back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
