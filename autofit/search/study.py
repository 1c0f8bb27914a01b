"""The search: ask the sampler for a config, have it measured, learn from it, until a limit is reached. It knows nothing
of models, devices or techniques: the tuning room hands over functions, the `SearchProblem`."""

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.study import Study
from optuna.trial import Trial, TrialState

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement, Outcome
from autofit.search.concurrency import Concurrency, Probe, Threaded
from autofit.search.drift import slowdown
from autofit.search.enumeration import Enumeration
from autofit.search.finals import Explored, Finals
from autofit.search.journal import Journal, open_study, record
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, PriorMeasurements
from autofit.search.ranking import fastest
from autofit.search.sampler import SurrogateSampler, measurements_of
from autofit.search.space import Space
from autofit.search.surrogate import SPEED_NOISE, Surrogate

# Before each probe the whole pool is scored: 0.2 s for 50,000 configs, up to 1 s and half a GiB for 230,000. On
# synthetic problems with poor predictions the whole space found better configs in two of six searches, never worse.
_MOST_SCORED = 50_000
# Without predictions, the share of all trials that may run at once, and how many always may. On the recorded tables
# 107 of 108 searches of 16 gangs came within 2 % of the best; with 0.35 or 0.45 of the trials nine of ten did.
_AT_ONCE, _FEW = 0.25, 4
# A quick search goes on while a config left is expected to be so much faster, up to so many times its measurements.
_MUCH_FASTER, _MOST_QUICK = 0.15, 3


@dataclass(frozen=True)
class SearchProblem:
    """The functions and facts that a search is given."""

    probe: Probe  # gets a number, a config, and the seconds per step of the best so far, to stop hopeless ones
    constraints: Constraints
    memory_order: Callable[[str, Value], int | None]  # the proven rank of a knob's value (`Technique.memory_order`)
    on_finished: Callable[[Measurement, Measurement | None], None]  # gets each, and the best one that fits so far
    on_started: Callable[[int, int], None] = lambda size, refused: None  # before the first probe
    predict: Callable[[Sequence[Config]], Predictions | None] = lambda configs: None
    prior_measurements: Sequence[PriorMeasurement] = ()  # they guide the first probes, and are no part of the outcome
    on_probe: Callable[[int, Config], None] = lambda number, config: None  # as each probe starts
    concurrency: Callable[[Probe], Concurrency] = Threaded  # makes of `probe` what runs it, several at a time or not


@dataclass(frozen=True)
class Limits:
    """When a search ends, and the memory it searches within. With a `tolerance` it also ends once no config left is
    expected to beat the best, nor the best of its tier, by more than that share."""

    trials: int = 40  # finished measurements, resumed ones included
    time_limit: float | None = None  # seconds, of this process only
    memory_bytes: int | None = None  # what tensors may take (`Budget.cap_bytes`)
    context_bytes: int | None = None  # of a card's context, beside which that is; None on a CPU
    tolerance: float | None = None
    # Measurements that suffice once one fits, or else the first that takes as long as predicted, unless another config
    # is still expected to be much faster; no tier's best is searched for then.
    quick: int | None = None
    latest: float = math.inf  # seconds until it ends also where nothing is measured: a late answer beats none
    # The time limit as it was asked for, whatever is left of it: asked the same, a finished search gives its answer.
    asked_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"{self.trials} trials measure nothing.", "Give a number of trials of at least 1.")
        if self.time_limit is not None and not (self.time_limit > 0 and math.isfinite(self.time_limit)):
            raise InputError(f"the time limit must be positive, not {self.time_limit}.", "Leave it out for none.")

    def asked(self) -> dict[str, Any]:
        """What decides when the search ends."""
        names = ("trials", "tolerance", "quick", "asked_seconds")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SearchOutcome:
    """All measurements by number, why there are no more, and the surrogate to ask with them."""

    measurements: tuple[Measurement, ...]
    skipped: dict[str, int]  # configs never measured: predicted not to fit, dominated by an out-of-memory, refused
    # "trials", "time", "interrupt", "space" (none left) or "bound" (none is expected to be faster, or to fit).
    stopped_by: str
    space_size: int
    # The share by which any left may be faster than the best, at 95 %; None where none is left or nothing fits.
    bound: float | None = None
    posterior: tuple[Measurement, ...] = ()  # of every config that fits, at the speed expected given all measurements
    slowdown: float = 0.0  # the largest share by which the machine was slower or faster than at the end, by repeats
    misled_by: float = 0.0  # how many times longer than predicted steps take, where predictions may mislead; else 0
    surrogate: Surrogate | None = field(default=None, compare=False, repr=False)
    finals: Finals | None = field(default=None, compare=False, repr=False)  # where to keep what is verified


def search(
    space: Space, problem: SearchProblem, *, limits: Limits | None = None, journal: Journal | None = None, seed: int = 0
) -> SearchOutcome:
    """Measure configs of a space, each once but for a leader repeated to see drift, until a limit or an interrupt.
    Raises InputError where the space contradicts itself, or the journal cannot be continued."""
    limits = limits or Limits()
    memory_bytes = limits.memory_bytes
    began = time.monotonic()
    deadline = began + (limits.time_limit or math.inf)
    enumeration = Enumeration(space.knobs, problem.constraints)
    legal = enumeration.configs(seed)
    size = enumeration.count(refused=True).configs
    refused = size - enumeration.count().configs
    problem.on_started(size, refused)
    predictions = problem.predict(legal) if len(legal) > 1 else None
    prior = _within(problem.prior_measurements, legal)
    possible: Sequence[Config] = legal
    if predictions is not None and memory_bytes is not None:
        likely = [config for config in legal if not predictions.surely_exceeds(config, memory_bytes)]
        possible = _with(prior.fits, legal, likely or legal)  # all if none would remain: predictions prove nothing
    pool = _with(prior.fits, legal, _worth_scoring(possible, predictions, memory_bytes, seed))
    # Every value of each knob of the space: the listed ones, and canonical ones they lead to (null at rank 0).
    values = {
        knob: tuple(dict.fromkeys((*listed, *(config[knob] for config in legal))))
        for knob, listed in space.knobs.items()
    }
    surrogate = Surrogate(
        values,
        pool,
        memory_order=problem.memory_order,
        memory_bytes=memory_bytes,
        context_bytes=limits.context_bytes,
        predictions=predictions,
        prior=prior,
    )
    sampler = SurrogateSampler(
        surrogate,
        seed=seed,
        tolerance=limits.tolerance,
        of_tiers=limits.quick is None,
        time_left=lambda: deadline - time.monotonic(),
    )
    with _quiet():
        if journal is not None:  # Optuna's parameters cannot change their choices
            knobs = {knob: list(values) for knob, values in space.knobs.items()}
            journal = dataclasses.replace(journal, identity={**journal.identity, "space": knobs})
        study = open_study(journal, sampler)
        finals = Finals(study, limits.asked(), measurements_of(study))
        explored = finals.explored
        if explored is None:
            stopped_by = _Exploration(study, sampler, problem, limits, began=began).run()
            explored = _explored(surrogate, sampler, measurements_of(study), stopped_by)
            if stopped_by != "interrupt" and explored.measurements:
                finals.begin(explored)
        measurements = measurements_of(study)
    measured = {measurement.config for measurement in measurements}
    left = sampler.left(measurements)
    return SearchOutcome(
        tuple(measurements),
        skipped={
            "predicted": len(legal) - len(possible),
            "dominated": sum(config not in measured for config in pool) - int(left.sum()),
            "refused": refused,
        },
        stopped_by=explored.stopped_by,
        space_size=size,
        bound=explored.bound,
        posterior=explored.posterior(measurements),
        slowdown=math.expm1(float(abs(slowdown(measurements, noise=SPEED_NOISE)).max(initial=0.0))),
        misled_by=surrogate.misled_by(measurements),
        surrogate=surrogate,
        finals=finals,
    )


def _explored(
    surrogate: Surrogate, sampler: SurrogateSampler, measurements: Sequence[Measurement], stopped_by: str
) -> Explored:
    """What exploring ended with."""
    left = sampler.left(measurements)
    bound = surrogate.regret_bound(measurements, left) if left.any() else math.inf
    expected = {
        str(each.number): each.step_seconds.median for each in surrogate.posterior(measurements) if each.step_seconds
    }
    return Explored(len(measurements), stopped_by, bound if math.isfinite(bound) else None, expected)


def _within(measurements: Sequence[PriorMeasurement], legal: Sequence[Config]) -> PriorMeasurements:
    """Earlier measurements of configs in this space; others have no prediction to compare with."""
    own = {config: config for config in legal} if measurements else {}  # looking up the same object is faster
    return PriorMeasurements(
        [dataclasses.replace(each, config=own[each.config]) for each in measurements if each.config in own]
    )


def _with(fitting: set[Config], legal: Sequence[Config], chosen: Sequence[Config]) -> Sequence[Config]:
    """The chosen configs and those already measured to fit, whatever is predicted; in the order of the legal ones."""
    if len(chosen) == len(legal) or not fitting:
        return chosen
    wanted = fitting.union(chosen)
    return [config for config in legal if config in wanted]


def _worth_scoring(
    configs: Sequence[Config], predictions: Predictions | None, memory_bytes: int | None, seed: int
) -> Sequence[Config]:
    """As many configs as the sampler can score before each probe: the most promising ones, or without predictions a
    random sample with the first config, which should need the least memory."""
    if len(configs) <= _MOST_SCORED:
        return configs
    if predictions is not None:
        return predictions.most_promising(configs, memory_bytes or math.inf, _MOST_SCORED)
    others = random.Random(seed).sample(range(1, len(configs)), _MOST_SCORED - 1)
    return [configs[index] for index in sorted([0, *others])]


class _Exploration:
    """Measures configs, as many at a time as there are places, until something stops it."""

    def __init__(
        self, study: Study, sampler: SurrogateSampler, problem: SearchProblem, limits: Limits, *, began: float
    ) -> None:
        self._study, self._sampler, self._problem = study, sampler, problem
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
                stopped_by = None
                while len(self._running) < self._places() and not (stopped_by := self._stop_reason()):
                    self._start()
                if not self._running:
                    assert stopped_by, "it goes on until there is a reason to stop"
                    return stopped_by
                if measurement := self._record(*self._probes.wait()):
                    leader = self._sampler.surrogate.leader(measurements_of(self._study))
                    self._problem.on_finished(measurement, leader)
        except KeyboardInterrupt:
            return "interrupt"
        finally:
            self._end()

    def _places(self) -> int:
        """How many probes may run at once: without predictions few enough that later ones learn from the first."""
        if self._sampler.surrogate.informed:
            return self._probes.places
        return min(self._probes.places, max(_FEW, int(_AT_ONCE * self._limits.trials)))

    def _stop_reason(self) -> str | None:
        """Why no further probe starts now; the results of running ones may change it."""
        measurements = measurements_of(self._study)
        measurements = self._sampler.with_running(measurements, self._sampler.running(self._study))
        if not self._sampler.left(measurements).any():
            return "space"
        if len(measurements) >= self._limits.trials or self._suffice(measurements):
            return "trials"
        if self._sampler.aim(measurements) is None:
            return "bound"
        end = self._deadline if measurements else self._latest
        return "time" if self._was_cut_short or time.monotonic() >= end else None

    def _suffice(self, measurements: Sequence[Measurement]) -> bool:
        """Whether a quick search has measured enough. What was refused says nothing of speed and does not count."""
        quick = self._limits.quick
        if quick is None or not any(each.fits for each in measurements):
            return False
        ran = sum(each.outcome is not Outcome.REFUSED for each in measurements)
        if ran >= _MOST_QUICK * quick:
            return True
        if self._sampler.surrogate.expects_faster(measurements, self._sampler.left(measurements), _MUCH_FASTER):
            return False
        return ran >= quick or self._sampler.surrogate.confirmed_by(measurements)

    def _start(self) -> None:
        measurements = measurements_of(self._study)
        best = fastest(measurements)
        taken = {each.number for each in measurements} | set(self._running)
        number = next(each for each in itertools.count() if each not in taken)
        trial = self._study.ask(self._sampler.distributions)
        self._running[number] = trial
        config = self._sampler.config(trial.params)
        self._problem.on_probe(number, config)
        self._probes.submit(number, config, best.step_seconds.median if best and best.step_seconds else None)

    def _record(self, number: int, measurement: Measurement | None) -> Measurement | None:
        if measurement is None:
            self._was_cut_short = True
            self._abandon(self._running.pop(number))
            return None
        measurement = dataclasses.replace(measurement, number=number)
        record(self._study, self._running[number], measurement)
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
        """Nothing happens after `record`; the config of one that was never measured may be measured again."""
        self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, which reports every trial to stderr; the user's own studies get their verbosity back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
