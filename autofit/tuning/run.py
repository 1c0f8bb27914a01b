"""Joins the rooms: the search asks, probes answer, the finalists are verified, the answer is written down."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.budget import FREE_FRACTION, gib_to_bytes
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Listener, Note, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import SearchOptions
from autofit.core.record import Record
from autofit.core.result import Result, tier
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate import compared, learn, predict_all
from autofit.hardware.budgets import budget_for, budget_notes, other_budgets
from autofit.hardware.catalogue import card_to_search_for, standing_in_for
from autofit.probe import Contention, LocalExecutor, Plan, PoolExecutor, Request
from autofit.report import drift_note
from autofit.search import (
    Alone,
    Crew,
    Evidence,
    Journal,
    Limits,
    Predictions,
    Probe,
    SearchOutcome,
    SearchProblem,
    Threads,
    Verification,
    begun_with,
    best_of_tiers,
    finalists,
    nearest_miss,
    outlook,
    search,
    verify,
    verify_tiers,
)
from autofit.tuning.artifacts import write_artifacts, write_report
from autofit.tuning.places import check_memory, cores_of_each, described, explored, places_for, seen_by_each
from autofit.tuning.record import follow_tiers, make_record, trace_best
from autofit.tuning.space import space_for
from autofit.tuning.warm_start import WarmStart, subject_of

EXPLORE_SHARE = 0.75  # of a time limit; the rest is for verifying
EXPECT_SECONDS, EXPECT_SHARE = 300.0, 0.5  # for predicting a space, at most and of a time limit, else it goes without
EXPLORE_PLAN = Plan()
VERIFY_PLAN = Plan(min_steps=5, max_steps=50, max_seconds=6.0, compose=False)
DRIFT_TOLD = 0.05  # what is less lies within what two probes of one config differ by


def run_search(workload: Workload, options: SearchOptions, listener: Listener | None = None) -> Result:
    """Search for the fastest config that fits the budget, verify it, and write the run directory.

    `best` is None when nothing fits. Ctrl-C ends the search early, with what it has: `stopped_by` is "interrupt".

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here.
    """
    start = time.monotonic()
    listener = listener or _silent
    listener(PhaseStarted("looking at the model and the device"))
    named = options.out is not None
    out = options.out or Path("autofit-runs") / new_run_name(workload.name)
    with RunDirectory(out, resume=options.resume) as directory:
        try:
            with LocalExecutor(directory.probes, options.probe_timeout) as executor:
                run = _Run(workload, options, executor, directory=directory, listener=listener)
                outcome = run.explore()
                finals = run.verify(outcome)
                result = run.result(outcome, finals, time.monotonic() - start)
                if options.memory_snapshot:
                    listener(PhaseStarted("tracing one training step of the best config"))
                    result = trace_best(result, run.workload, executor, directory=directory.path, notify=run.notify)
                record = run.record(result)
        except BaseException:  # Ctrl-C too
            directory.discard_if_unused(keep_folder=named)
            raise
        run.calibrate(finals)
        listener(PhaseStarted("writing the result and the report"))
        result = write_artifacts(record.result, run.workload, directory, notify=run.notify)
        return write_report(dataclasses.replace(record, result=result), directory, notify=run.notify)


class _Run:
    """One search: what was found out about the machine and the workload, and the functions handed to the search."""

    def __init__(
        self,
        workload: Workload,
        options: SearchOptions,
        executor: LocalExecutor,
        *,
        directory: RunDirectory,
        listener: Listener,
    ) -> None:
        self._started = time.monotonic()
        self.options = options
        self._executor = executor
        self._directory = directory
        self._listener = listener
        target = card_to_search_for(options.gpu) if options.gpu else None  # what is no such name is told at once
        memory = options.mem if options.mem is not None else options.gpu_mem
        budget_bytes = gib_to_bytes(memory) if memory is not None else None
        hardware, traits = executor.look(workload, options.wanted_device, budget_bytes)
        self.hardware = standing_in_for(hardware, target) if target else hardware
        self.workload = dataclasses.replace(workload, traits=traits)
        by_default = memory is None and target is None
        most = self.hardware.memory_bytes  # what is asked for beyond it means the card
        self._asked_bytes = None if by_default else min(budget_bytes or most, most)
        before, started_with = begun_with(directory.journal)
        if before.get("budget_bytes") != self._asked_bytes:
            started_with = None
        self.budget = budget_for(options, self.hardware, started_with)
        self._budget_notes = tuple(budget_notes(options, self.hardware, self.budget))
        self._places = places_for(options.workers, hardware, executor, self.budget.cap_bytes(hardware.device))
        free_bytes = int(self.hardware.host_free_bytes * FREE_FRACTION)
        check_memory(self._places, self.budget, free_bytes, given=not by_default)
        self._explorers: LocalExecutor | PoolExecutor = executor
        self._cap_bytes = self.budget.cap_bytes(self.hardware.device, self.hardware.context_bytes)
        self._warm_start = self._warm_start_on(seen_by_each(self._places, hardware))
        self._finalists_warm_start = self._warm_start_on(hardware) if cores_of_each(self._places) else self._warm_start
        for note in (
            *hardware.notes,
            *self._budget_notes,
            *traits.notes,
            *([described(self._places, hardware)] if self._places else ()),
        ):
            listener(Note(note))
        if options.store and traits.fingerprint is None:
            listener(
                Note("this model's code cannot be told from another's: what was measured before is not looked up.")
            )
        self._expected: Predictions | None = None
        self._waiting = 1.0  # the share of the time that something waited for a processor while finalists ran
        self.space = space_for(options, self.workload, self.hardware)

    def _warm_start_on(self, hardware: Hardware) -> WarmStart:
        return WarmStart(
            subject_of(self.workload, hardware, versions()) if self.options.store else None,
            self._cap_bytes,
            exact=hardware.device == "cpu",
            run=self._directory.path,
            notify=lambda text: self._listener(Note(text)),
        )

    def explore(self) -> SearchOutcome:
        """Probe configs of the space until a limit is reached."""
        with contextlib.ExitStack() as ends:
            crew: Callable[[Probe], Crew] = Alone
            if places := self._places[: self.options.trials]:
                workers = ends.enter_context(PoolExecutor(places, self._directory.probes, self.options.probe_timeout))
                self._explorers = workers
                crew = functools.partial(Threads, size=len(places), stop=workers.close)
            journal = Journal(self._directory.journal, self._identity(), self.budget.device_bytes)
            outcome = self._search(journal, crew)
        if outcome.stopped_by != "interrupt":
            self._check_that_there_was_something(outcome)
            self._check_that_probes_ran(outcome.measurements)
        return outcome

    def _search(self, journal: Journal, crew: Callable[[Probe], Crew]) -> SearchOutcome:
        problem = SearchProblem(
            probe=self._probe,
            constraints=techniques.constraints(self.workload, self.hardware),
            memory_order=lambda knob, value: techniques.technique_named(knob).memory_order(value),
            on_finished=self._finished,
            on_started=lambda size, refused: started(size, refused),
            expect=self._expect,
            known=self._warm_start.prior_measurements(resumed=self.options.resume),
            on_probe=lambda number, config: self._listener(ProbeStarted(number, config, False, self._peak_of(config))),
            crew=crew,
        )
        time_limit = self.options.time_limit
        limits = Limits(
            trials=self.options.trials,
            time_limit=time_limit and time_limit * EXPLORE_SHARE,
            memory_bytes=self._cap_bytes,
            tolerance=self.options.tolerance,
        )

        def started(size: int, refused: int) -> None:
            trials, name = min(size - refused, limits.trials), self.workload.name
            self._listener(SearchStarted(name, self.hardware, self.budget, size, trials, time_limit, refused))

        return search(self.space, problem, limits=limits, journal=journal, seed=self.options.seed)

    def verify(self, outcome: SearchOutcome) -> Verification:
        """Measure again, longer, whatever may be the best."""
        if outcome.stopped_by == "interrupt":
            return Verification(outcome.measurements, interrupted=True)
        tolerance, fidelity = self.options.tolerance, techniques.fidelity
        elsewhere = cores_of_each(self._places) is not None
        contention = Contention()
        finals = verify(
            outcome.measurements,
            outcome.expected,
            self._verify_one,
            tolerance=tolerance,
            fidelity=fidelity,
            in_time=lambda: time.monotonic() - self._started < (self.options.time_limit or math.inf),
            elsewhere=elsewhere,
        )
        self._waiting = contention.share()
        if not elsewhere or finals.interrupted:
            return finals
        return verify_tiers(finals, outcome.expected, self._verify_one, tolerance=tolerance, fidelity=fidelity)

    def calibrate(self, finals: Verification) -> None:
        """Let later predictions know what was measured longest. On a CPU the bytes of tensors are exact as they are."""
        expected = self._expected
        if expected is None or cores_of_each(self._places):  # predicted for fewer cores than finalists run on
            return
        exact = self.hardware.device == "cpu"
        found = compared(finals.verified, expected.nbytes, expected.seconds, exact=exact, waiting=self._waiting)
        learn(self.hardware, found)

    def result(self, outcome: SearchOutcome, finals: Verification, seconds: float) -> Result:
        """Everything as data."""
        best, runner_up = (*self._ranked(finals.candidates())[:2], None, None)[:2]
        known = finals.verified if cores_of_each(self._places) and finals.verified else finals.latest()
        tiers = best_of_tiers(known, tolerance=self.options.tolerance, fidelity=techniques.fidelity)
        if best is not None:
            tiers[tier(best.config)] = best  # not one that was only explored, and promised more
        others = other_budgets(self.budget, self.hardware)
        where = [explored(self._places)] if cores_of_each(self._places) else []
        around = outlook(self._evidence(outcome, finals, best), others=others, tolerance=self.options.tolerance)
        return Result(
            model=self.workload.name,
            workload=self.workload.summary(),
            source=self.workload.source,
            hardware=self.hardware,
            budget=self.budget,
            versions=versions(),
            best=best,
            tiers=tiers,
            trials=tuple(outcome.measurements),
            skipped=outcome.skipped,
            stopped_by="interrupt" if finals.interrupted else outcome.stopped_by,
            space_size=outcome.space_size,
            search_seconds=seconds,
            nearest_miss=nearest_miss(outcome.measurements) if best is None else None,
            runner_up=runner_up,
            finalists=finals.verified,
            bound=outcome.bound,
            notes=(*self._budget_notes, *_notes(outcome, best), *where),
            frontier=around.frontier,
            alternatives=around.alternatives,
            other_budgets=around.other_budgets,
            predicted=self._expected is not None,
        )

    def record(self, result: Result) -> Record:
        """The result with all that a report needs."""
        if result.best and result.stopped_by != "interrupt":
            self._listener(PhaseStarted("following a training step of the best configs, for the report"))
        timelines = follow_tiers(result, self.workload, self.options, self._executor)
        return make_record(result, self.options, predictions=self._expected, timelines=timelines)

    def notify(self, text: str) -> None:
        """Let the user know something, in one sentence."""
        self._listener(Note(text))

    def _evidence(self, outcome: SearchOutcome, finals: Verification, best: Measurement | None) -> Evidence:
        return Evidence(
            best=best,
            measurements=(*(finals.levelled() if cores_of_each(self._places) else finals.explored), *finals.verified),
            failed=finals.failed,
            surrogate=outcome.surrogate,
            expected=self._expected,
            budget=self.budget,
            hardware=self.hardware,
            workload=self.workload,
        )

    def _expect(self, configs: Sequence[Config]) -> Predictions | None:
        """What the estimator says, in a process of its own; a search can do without."""
        timeout = min(EXPECT_SECONDS, EXPECT_SHARE * (self.options.time_limit or math.inf))
        self._listener(PhaseStarted(f"predicting {len(configs):,} configs before the first probe"))
        try:
            expect = functools.partial(predict_all, processes=None)  # on as many cores as probes run on
            nbytes, seconds = self._explorers.run(
                expect, self.workload, self.hardware, configs, log="estimate.log", timeout=timeout
            )
        except (InputError, ProbeError) as error:
            self._listener(Note(f"nothing is predicted of this search: {error.message}"))
            return None
        if any(map(math.isfinite, nbytes)):
            self._expected = Predictions.of(configs, nbytes, seconds)
        return self._expected

    def _probe(self, number: int, config: Config, best_seconds: float | None) -> Measurement:
        return self._measure(
            self._explorers, config, dataclasses.replace(EXPLORE_PLAN, best_seconds=best_seconds), number
        )

    def _measure(self, executor: LocalExecutor | PoolExecutor, config: Config, plan: Plan, number: int) -> Measurement:
        return executor.measure(self.workload, Request(config, self.hardware, self.budget, plan), number=number)

    def _peak_of(self, config: Config) -> int | None:
        """The peak that is predicted, as the budget counts it."""
        tensors = self._expected.nbytes.get(config, math.nan) if self._expected else math.nan
        return int(tensors) + self.hardware.context_bytes if math.isfinite(tensors) else None

    def _finished(self, measurement: Measurement, best: Measurement | None) -> None:
        self._warm_start.add(measurement)
        self._listener(ProbeFinished(measurement, best))

    def _ranked(self, measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
        """Those that fit, in the order in which they would be recommended."""
        count = len(measurements)
        return finalists(measurements, tolerance=self.options.tolerance, fidelity=techniques.fidelity, count=count)

    def _verify_one(self, finalist: Measurement) -> Measurement:
        self._listener(ProbeStarted(finalist.number, finalist.config, verifying=True))
        seen = self._measure(self._executor, finalist.config, VERIFY_PLAN, finalist.number)
        self._finalists_warm_start.add(seen, plan="verified")
        self._listener(ProbeFinished(dataclasses.replace(seen, verified=seen.fits), None))
        return seen

    def _identity(self) -> dict[str, Any]:
        """What must be the same for measurements to be comparable when a search is resumed."""
        return {
            "model": self.workload.name,
            **self.workload.summary(),
            "device": self.hardware.name,
            # What is asked for: what is had of it, and the default, depend on what is free on the day.
            "budget_bytes": self._asked_bytes,
            "margin": self.budget.margin,
            "space": {knob: list(values) for knob, values in self.space.knobs.items()},
            "torch": importlib.metadata.version("torch"),
            "cores_of_each_worker": cores_of_each(self._places),
        }

    def _check_that_there_was_something(self, outcome: SearchOutcome) -> None:
        """Where every config is refused, memory was never the question: the reason against the first one is told."""
        if outcome.measurements or not outcome.skipped["refused"]:
            return
        values = {knob: values[0] for knob, values in self.space.knobs.items()}
        first = techniques.canonicalize(values, self.workload, self.hardware)
        reason = techniques.refuse(first, self.workload, self.hardware)
        if reason:
            raise InputError(f"every config of this search is refused, the first one because of {reason}")

    def _check_that_probes_ran(self, measurements: tuple[Measurement, ...]) -> None:
        outcomes = [measurement.outcome for measurement in measurements]
        if outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
            reason = measurements[0].reason or "no reason given"
            raise ProbeError(
                f"every probe failed: {reason.strip().splitlines()[-1]}", "See probes/ in the run directory."
            )


def _notes(outcome: SearchOutcome, best: Measurement | None) -> Iterator[str]:
    if outcome.slowdown > DRIFT_TOLD:
        yield drift_note(outcome.slowdown)
    for warning in best.warnings if best else ():
        yield f"Of the best config: {warning}"


def _silent(_: Event) -> None:
    """A listener that tells nobody."""


def new_run_name(model: str) -> str:
    """A directory for the run of a model that nobody has named one for."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', model).strip('-')}-{datetime.now():%Y%m%d-%H%M%S}"
