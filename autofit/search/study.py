"""The search itself: ask the sampler for a config, have it measured, learn, until a limit is reached.

It knows nothing of models, devices or techniques: tune hands over what it needs as functions, the `SearchProblem`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.study import Study
from optuna.trial import Trial

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement
from autofit.search.concurrency import Alone, Crew, Probe
from autofit.search.drift import slowdown
from autofit.search.enumeration import Enumeration
from autofit.search.journal import Journal, abandon, open_study, record
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, PriorMeasurements
from autofit.search.ranking import fastest
from autofit.search.sampler import SurrogateSampler, measurements_of
from autofit.search.space import Space
from autofit.search.surrogate import SPEED_NOISE, Surrogate

# Before each probe every config of the pool is weighed anew: 0.2 s for 50,000, up to 1 s and half a GiB for 230,000.
# On synthetic problems with poor predictions the whole pool found better configs in two of six searches, never worse.
_WEIGHED = 50_000


@dataclass(frozen=True)
class SearchProblem:
    """What a search needs done by others.

    probe: measures a config; gets its number, and the seconds per step of the best so far to stop hopeless ones.
    constraints: what makes knobs a canonical Config, and why one cannot be.
    memory_order: a knob's value -> its proven rank of memory (`Technique.memory_order`), or None.
    on_finished: is told each measurement, and the best one that fits so far.
    on_started: is told how many configs there are and how many of them are refused, before the first one is measured.
    expect: what is predicted of configs, or None.
    known: what earlier searches measured, by which the first probes are chosen; none of it is in the outcome.
    on_probe: is told each config that begins to be measured, with its number.
    crew: makes of `probe` who measures, and how many at a time.
    """

    probe: Probe
    constraints: Constraints
    memory_order: Callable[[str, Value], int | None]
    on_finished: Callable[[Measurement, Measurement | None], None]
    on_started: Callable[[int, int], None] = lambda size, refused: None
    expect: Callable[[Sequence[Config]], Predictions | None] = lambda configs: None
    known: Sequence[PriorMeasurement] = ()
    on_probe: Callable[[int, Config], None] = lambda number, config: None
    crew: Callable[[Probe], Crew] = Alone


@dataclass(frozen=True)
class Limits:
    """When a search ends, and the memory it searches within.

    `trials` counts finished measurements, resumed ones included; `time_limit` is in seconds and of this process only;
    `memory_bytes` is what tensors may take (`Budget.cap_bytes`), by which the sampler judges what will fit. It ends,
    too, once nothing left is expected to beat the best, nor that of its tier, by more than the share `tolerance`; None:
    goes on.
    """

    trials: int = 40
    time_limit: float | None = None
    memory_bytes: int | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"{self.trials} trials measure nothing.", "Give a number of trials of at least 1.")
        if self.time_limit is not None and not (self.time_limit > 0 and math.isfinite(self.time_limit)):
            raise InputError(f"the time limit must be positive, not {self.time_limit}.", "Leave it out for none.")


@dataclass(frozen=True)
class SearchOutcome:
    """All measurements by number, and why there are no more.

    `skipped` counts configs of the space never measured: predicted not to fit, dominated by one that ran out of memory,
    refused. `stopped_by` is "trials", "time", "bound" (nothing left that is expected to be faster), "space" (nothing
    left to measure) or "interrupt". `bound` is how much faster than the best measured one any other is expected to be
    at the most, at 95 %, as a share of it; None where nothing fits, or nothing is left. `expected` holds a measurement
    of every config that fits, with the speed that is expected of it given all of them. `slowdown` is by what share the
    machine was slower or faster at any time than at the end, as far as repeated measurements tell. `surrogate` are
    those
    of the whole space, to be asked with these measurements.
    """

    measurements: tuple[Measurement, ...]
    skipped: dict[str, int]
    stopped_by: str
    space_size: int
    bound: float | None = None
    expected: tuple[Measurement, ...] = ()
    slowdown: float = 0.0
    surrogate: Surrogate | None = field(default=None, compare=False, repr=False)


def search(
    space: Space, problem: SearchProblem, *, limits: Limits | None = None, journal: Journal | None = None, seed: int = 0
) -> SearchOutcome:
    """Measure configs of a space until a limit is reached or the user interrupts.

    Each is measured once; in a long search the leader again now and then, to see the machine drift.

    Raises:
        InputError: the space contradicts itself, or the journal cannot be continued.
    """
    limits = limits or Limits()
    deadline = time.monotonic() + (limits.time_limit or math.inf)
    enumeration = Enumeration(space.knobs, problem.constraints)
    legal = enumeration.configs(seed)
    size = enumeration.count(refused=True).configs
    refused = size - enumeration.count().configs
    problem.on_started(size, refused)
    expected = problem.expect(legal) if len(legal) > 1 else None
    past = _of_legal(problem.known, legal)
    possible = _with(past.fits, legal, _not_surely_too_large(legal, expected, limits.memory_bytes))
    pool = _with(past.fits, legal, _worth_weighing(possible, expected, limits.memory_bytes, seed))
    surrogate = Surrogate(
        _values(space, legal),
        pool,
        memory_order=problem.memory_order,
        memory_bytes=limits.memory_bytes,
        expected=expected,
    ).knowing(past)
    sampler = SurrogateSampler(surrogate, seed=seed, tolerance=limits.tolerance)
    with _quiet():
        study = open_study(_of_space(journal, space), sampler)
        stopped_by = _Exploration(study, sampler, problem, limits, deadline=deadline).run()
        measurements = measurements_of(study)
    measured = {measurement.config for measurement in measurements}
    never = sum(config not in measured for config in pool)
    left = sampler.left(measurements)
    dominated = never - int(left.sum())
    bound = sampler.surrogate.surplus(measurements, left) if left.any() else math.inf
    skipped = {"predicted": len(legal) - len(possible), "dominated": dominated, "refused": refused}
    return SearchOutcome(
        tuple(measurements),
        skipped,
        stopped_by,
        size,
        bound=bound if math.isfinite(bound) else None,
        expected=sampler.surrogate.settled(measurements),
        slowdown=math.expm1(float(abs(slowdown(measurements, noise=SPEED_NOISE)).max(initial=0.0))),
        surrogate=surrogate,
    )


def _not_surely_too_large(
    configs: Sequence[Config], expected: Predictions | None, memory_bytes: int | None
) -> Sequence[Config]:
    """The configs without those that cannot fit; all of them where that would leave none, for a prediction is no proof
    that nothing fits."""
    if expected is None or memory_bytes is None:
        return configs
    left = [config for config in configs if not expected.surely_exceeds(config, memory_bytes)]
    return left or configs


def _of_legal(known: Sequence[PriorMeasurement], legal: Sequence[Config]) -> PriorMeasurements:
    """What is known of the configs of this search; of others, nothing is expected that they could be held against."""
    own = {config: config for config in legal} if known else {}  # the same ones are found faster than equal ones
    return PriorMeasurements(
        [dataclasses.replace(each, config=own[each.config]) for each in known if each.config in own]
    )


def _with(seen: set[Config], legal: Sequence[Config], chosen: Sequence[Config]) -> Sequence[Config]:
    """The chosen ones of the legal configs, and those that were seen to fit, whatever is predicted; in their order."""
    if len(chosen) == len(legal) or not seen:
        return chosen
    wanted = seen.union(chosen)
    return [config for config in legal if config in wanted]


def _worth_weighing(
    configs: Sequence[Config], expected: Predictions | None, memory_bytes: int | None, seed: int
) -> Sequence[Config]:
    """As many as the sampler can weigh before each probe: the most promising, or any where nothing is expected of them;
    then with the first one, which should need the least memory."""
    if len(configs) <= _WEIGHED:
        return configs
    if expected is not None:
        return expected.most_promising(configs, memory_bytes or math.inf, _WEIGHED)
    others = random.Random(seed).sample(range(1, len(configs)), _WEIGHED - 1)
    return [configs[place] for place in sorted([0, *others])]


class _Exploration:
    """Configs are measured, as many at a time as the crew can, until something stops it."""

    def __init__(
        self, study: Study, sampler: SurrogateSampler, problem: SearchProblem, limits: Limits, *, deadline: float
    ) -> None:
        self._study, self._sampler, self._seams = study, sampler, problem
        self._limits, self._deadline = limits, deadline
        self._crew = problem.crew(problem.probe)
        self._running: dict[int, Trial] = {}  # by the number of its measurement

    def run(self) -> str:
        """Measure; what stopped it."""
        try:
            while True:
                stopped_by = None
                while len(self._running) < self._crew.size and not (stopped_by := self._enough()):
                    self._start()
                if not self._running:
                    assert stopped_by, "only an end leaves nobody measuring"
                    return stopped_by
                self._finish()
        except KeyboardInterrupt:
            return "interrupt"
        finally:
            self._end()

    def _enough(self) -> str | None:
        """Why no further probe is started now; what those that run will show may change it."""
        measurements = measurements_of(self._study)
        believed = self._sampler.believed(measurements, self._sampler.running(self._study))
        if not self._sampler.left(believed).any():
            return "space"
        if len(believed) >= self._limits.trials:
            return "trials"
        if self._sampler.aim(believed) is None:
            return "bound"
        return "time" if time.monotonic() >= self._deadline else None

    def _start(self) -> None:
        measurements = measurements_of(self._study)
        best = fastest(measurements)
        taken = {each.number for each in measurements} | set(self._running)
        number = next(each for each in itertools.count() if each not in taken)
        trial = self._study.ask(self._sampler.distributions)
        self._running[number] = trial
        config = self._sampler.config(trial.params)
        self._seams.on_probe(number, config)
        self._crew.start(number, config, best.step_seconds.median if best and best.step_seconds else None)

    def _finish(self) -> None:
        number, measured = self._crew.wait()
        measured = self._record(number, measured)
        self._seams.on_finished(measured, self._sampler.surrogate.leader(measurements_of(self._study)))

    def _record(self, number: int, measured: Measurement) -> Measurement:
        measured = dataclasses.replace(measured, number=number)
        record(self._study, self._running[number], measured)
        del self._running[number]
        return measured

    def _end(self) -> None:
        """What is still being measured is given up, what has just been is kept."""
        try:
            for number, measured in self._crew.end():
                self._record(number, measured)
        finally:
            for trial in self._running.values():
                abandon(self._study, trial.number)  # does nothing after `record`


def _values(space: Space, configs: Sequence[Config]) -> dict[str, tuple[Value, ...]]:
    """Every value each knob of the space takes: those it lists, and what settling made of them (null at rank 0)."""
    return {
        knob: tuple(dict.fromkeys((*listed, *(config[knob] for config in configs))))
        for knob, listed in space.knobs.items()
    }


def _of_space(journal: Journal | None, space: Space) -> Journal | None:
    """The space belongs to what a journal is of: Optuna's parameters cannot change their choices."""
    if journal is None:
        return None
    knobs = {knob: list(values) for knob, values in space.knobs.items()}
    return dataclasses.replace(journal, identity={**journal.identity, "space": knobs})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna reports every trial to stderr by itself; the user's own studies get their verbosity back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
