"""One search from start to end: explore the space, verify the finalists, write the answer down."""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from autofit import techniques
from autofit.core.beginning import began
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Listener, Note, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.hardware import Hardware
from autofit.core.layout import divided_by
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import SearchOptions
from autofit.core.result import Result, tier
from autofit.core.run_directory import RunDirectory, free_run_directory
from autofit.core.workload import Workload
from autofit.estimate.calibration import compare, learn
from autofit.estimate.figures import predict_all
from autofit.estimate.operators import MEASURING_SECONDS
from autofit.hardware.budgets import other_budgets
from autofit.probe import (
    LEAST_SECONDS,
    Contention,
    Executor,
    GangExecutor,
    LocalExecutor,
    Plan,
    PoolExecutor,
    RayExecutor,
    Request,
)
from autofit.report.formatting import drift_note, misled_note, packing_note
from autofit.search.concurrency import Threaded
from autofit.search.finals import Finals
from autofit.search.journal import Journal
from autofit.search.pareto import Evidence, outlook
from autofit.search.predictions import Predictions
from autofit.search.ranking import best_of_tiers, finalists, nearest_miss
from autofit.search.space import Space
from autofit.search.study import Limits, SearchOutcome, SearchProblem, search
from autofit.search.verification import Verification, confirm, verify
from autofit.tuning.artifacts import (
    follow_devices,
    follow_tiers,
    layers_for_exports,
    make_record,
    trace_best,
    with_bottleneck,
    with_remedies,
    write_artifacts,
    write_report,
)
from autofit.tuning.context import Context, Judging, context_of
from autofit.tuning.narrowing import narrowed, quick, with_whole_batches, without_micro_batches
from autofit.tuning.stand_in import Communication, with_communicators
from autofit.tuning.warm_start import WarmStart, subject_of

# Of a time limit: when exploring ends, how much longer what then runs may take, and when no finalist is begun any more
# that would take longer; the rest is for the report.
EXPLORE_SHARE, OVERRUN_SHARE, VERIFY_SHARE = 0.7, 0.1, 0.9
PREDICT_SECONDS, PREDICT_SHARE = 300.0, 0.5  # for predicting a space, at most and of a time limit; else it is skipped
TRACE_SHARE = 0.6  # of that for tracing; the rest is for putting together what could be traced
_WHY_UNKNOWN = "their steps could not be followed, or not in the time for that"
# Probes differ by more than steps of one do. Eight configs of tiny-llama, each measured in five processes on 2 busy
# cores: the medians of the first 2, 3, 4, 5 and 8 steps all differ by 7 to 8 % between processes.
EXPLORE_PLAN = Plan(min_steps=2, max_seconds=0.75)
VERIFY_PLAN = Plan(min_steps=4, max_steps=50, max_seconds=1.5, compose=False)
# Of a search that should be fast, as batch-size finders are: few probes, until no other may be so much faster.
FAST_PROBES, FAST_TOLERANCE = 2, 0.1
FAST_EXPLORE_PLAN, FAST_PLAN = Plan(min_steps=2, max_seconds=0.5), Plan(max_seconds=1.0, compose=False)
_FAST_MEASURING = 0.5  # seconds for timing operators before configs are predicted
_FAST = (
    "A quick search (--fast) looks at usual values, and measures few: one, if it takes about as long as predicted, and "
    "others that are expected to be much faster. The best config was confirmed by one longer run, and not measured "
    "against another again. A search without it may find a faster one."
)
_FINISHED = (
    "this search had finished: its answer is given again. More --trials, another --tolerance or another --time-limit "
    "go on with it."
)
_MOST_OF_NAME = 100  # characters of a model's name in that of its run directory
NOTABLE_DRIFT = 0.05  # a smaller one lies within the difference of two probes of one config


def run_search(
    workload: Workload, options: SearchOptions, listener: Listener | None = None, *, judge: Judging | None = None
) -> Result:
    """Search for the fastest config that fits the budget, verify it, and write the run directory.

    `best` is None when nothing fits. Ctrl-C ends the search early, with what it has: `stopped_by` is "interrupt".

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here.
    """
    start = began()
    listener = listener or (lambda event: None)
    listener(PhaseStarted("looking at the model and the device"))
    with run_directory(workload, options.out, resume=options.resume) as directory:
        if options.resume and not directory.journal.exists():  # the search before was killed early
            listener(Note(f"nothing was measured in {directory.path} before: the search starts anew."))
        until = start + (options.time_limit or math.inf)
        with contextlib.ExitStack() as stack:
            executor = stack.enter_context(_executor(options, directory, listener, start))
            executor.end_by(until)
            context = context_of(workload, options, executor, directory.journal)
            if context.ranks and executor.own_ranks is None:
                stack.close()  # one that serves no more needs no memory
                executor = stack.enter_context(GangExecutor(context.ranks, directory.probes, options.probe_timeout))
                executor.end_by(until)
            if context.ranks and options.link is None and context.hardware == context.measured_on:  # none else is meant
                context = context.linked_by(executor.link(context.hardware, context.budget))
            run = _Run(context, executor, directory, listener, start)
            outcome = run.explore()
            finals = run.verify(outcome)
            result = run.result(outcome, finals)
            if judge and result.best and result.stopped_by != "interrupt":
                judging = time.monotonic()
                executor.end_by(math.inf)  # it has seconds of its own
                result = judge(result, executor, listener)
                executor.end_by(until + time.monotonic() - judging)
            if options.memory_snapshot:
                listener(PhaseStarted("tracing one training step of the best config"))
                result = trace_best(result, context.workload, executor, directory=directory.path, notify=run.notify)
            follows = not options.fast
            if follows and result.best and result.stopped_by != "interrupt":
                listener(PhaseStarted("following a training step of the best configs, for the report"))
            timelines = follow_tiers(result, context.workload, options, executor) if follows else {}
            result = follow_devices(result, context.workload, options, executor) if follows else result
            result = with_bottleneck(result, timelines)
            nearest = result.nearest_miss or next(iter(result.trials), None)
            result = with_remedies(result, nearest.config if nearest else None, context.workload, options, executor)
            layers = layers_for_exports(result, context.workload, executor)
            record = make_record(result, options, run.predictions, timelines)
        run.calibrate(finals)
        run.restored()
        listener(PhaseStarted("writing the result and the report"))
        result = write_artifacts(record.result, context.workload, directory, notify=run.notify, layers=layers)
        return write_report(dataclasses.replace(record, result=result), directory, notify=run.notify)


def _executor(options: SearchOptions, directory: RunDirectory, listener: Listener, start: float) -> Executor:
    """What looks at the model; on a cluster, what measures as well."""
    if options.executor == "local":
        return LocalExecutor(directory.probes, options.probe_timeout)
    until = start + (options.time_limit or math.inf)
    cluster = RayExecutor(options, directory.probes, lambda text: listener(Note(text)), until)
    listener(Note(cluster.describe()))
    return cluster


class _Run:
    """One search: its context, and the functions handed to the rooms that search, verify and report."""

    def __init__(
        self, context: Context, executor: Executor, directory: RunDirectory, listener: Listener, start: float
    ) -> None:
        self.context, self.options = context, context.options
        self.predictions: Predictions | None = None
        self._figured: tuple[Sequence[Config], tuple[list[float], list[float]]] | None = None
        self._executor, self._explorer = executor, executor
        self._directory, self._listener, self._start = directory, listener, start
        self._had_finished = False  # before this process began
        self._contention = 1.0  # the share of the time in which something waited for a processor while finalists ran
        self._communication = Communication(context.workload, context.hardware, executor)
        self._explored = self._warm_start_on(context.placement.hardware(context.measured_on))
        self._verified = self._warm_start_on(context.measured_on) if context.fewer_cores else self._explored
        for note in context.notes():
            self.notify(note)

    def notify(self, message: str) -> None:
        self._listener(Note(message))

    def _left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time limit is over."""
        return self._start + share * (self.options.time_limit or math.inf) - time.monotonic()

    def _warm_start_on(self, hardware: Hardware) -> WarmStart:
        context, run = self.context, self._directory.path
        about = hardware, versions(), context.predicted_links
        subject = subject_of(context.workload, *about) if self.options.store else None
        exact = context.exact_memory
        return WarmStart(subject, context.cap_bytes, exact=exact, run=run, notify=self.notify, hardware=hardware)

    def explore(self) -> SearchOutcome:
        """Probe configs of the space until a limit is reached."""
        context, options = self.context, self.options
        path, budget_bytes, lines = self._directory.journal, context.budget.device_bytes, self._directory.lines
        journal = Journal(
            path, context.identity(), budget_bytes, notify=self.notify, lines=lines, restored=self.restored
        )
        seconds = max(self._left(EXPLORE_SHARE), LEAST_SECONDS) if options.time_limit else None
        memory = context.cap_bytes, context.context_bytes
        asked = options.time_limit
        latest = self._left()
        limits = Limits(
            options.trials, seconds, *memory, tolerance=options.tolerance, latest=latest, asked_seconds=asked
        )
        if options.fast:
            tolerance = max(options.tolerance, FAST_TOLERANCE)
            limits = dataclasses.replace(limits, tolerance=tolerance, quick=FAST_PROBES)
        with contextlib.ExitStack() as stack:
            devices = context.placement.devices
            if places := context.placement.places[: options.trials * devices]:
                pool = PoolExecutor(places, self._directory.probes, options.probe_timeout, devices)
                pool.end_by(self._executor.until)
                self._explorer = stack.enter_context(pool)
            else:
                self._explorer = stack.enter_context(self._executor.explorer())
            problem = SearchProblem(
                probe=self._probe,
                constraints=techniques.constraints(context.workload, context.hardware),
                memory_order=lambda knob, value: techniques.technique_named(knob).memory_order(value),
                on_finished=self._finished,
                on_started=self._started,
                predict=self._predict,
                prior_measurements=self._explored.prior_measurements(resumed=options.resume),
                on_probe=self._on_probe,
                concurrency=functools.partial(Threaded, room=self._explorer.room, give_up=self._explorer.give_up),
            )
            space = self._narrowed_space()
            outcome = search(space, problem, limits=limits, journal=journal, seed=options.seed)
        if outcome.stopped_by != "interrupt":
            self._check(outcome)
        self._had_finished = outcome.finals is not None and outcome.finals.finished
        return outcome

    def verify(self, outcome: SearchOutcome) -> Verification:
        if outcome.stopped_by == "interrupt":
            return Verification(outcome.measurements, interrupted=True)
        assert outcome.finals, "every search has a place for its finals"
        kept = outcome.finals
        if self._had_finished:
            self.notify(_FINISHED)
        given = outcome.measurements, outcome.posterior, functools.partial(self._verify_one, kept=kept)
        tolerance, fidelity = self.options.tolerance, techniques.fidelity

        contention = Contention()
        if self.options.fast:
            finals = confirm(*given, tolerance=tolerance, fidelity=fidelity, before=kept.verified)
        else:
            finals = verify(
                *given,
                tolerance=tolerance,
                fidelity=fidelity,
                seconds_left=lambda: self._left(VERIFY_SHARE),
                elsewhere=self.context.fewer_cores,
                before=kept.verified,
                finished=kept.finished,
            )
            self._contention = contention.share()

        has_ended = bool(finals.verified) or not finals.out_of_time
        if has_ended and not finals.interrupted:
            kept.finish()
        return finals

    def result(self, outcome: SearchOutcome, finals: Verification) -> Result:
        context, tolerance, fidelity = self.context, self.options.tolerance, techniques.fidelity
        candidates = finals.candidates()
        best, runner_up, *_ = (*finalists(candidates, tolerance=tolerance, fidelity=fidelity), None, None)
        comparable = finals.verified if context.fewer_cores and finals.verified else finals.latest()
        tiers = best_of_tiers(comparable, tolerance=tolerance, fidelity=fidelity)
        if best is not None:
            tiers[tier(best.config)] = best  # not an explored config that promised more
        measured, within = (*finals.explored, *finals.verified), (context.budget, context.hardware, context.workload)
        evidence = Evidence(best, measured, finals.failed, outcome.surrogate, self.predictions, *within)
        around = outlook(evidence, others=other_budgets(context.budget, context.hardware), tolerance=tolerance)
        notes = (
            *context.budget_notes,
            drift_note(outcome.slowdown) if outcome.slowdown > NOTABLE_DRIFT else None,
            misled_note(outcome.misled_by) if outcome.misled_by else None,
            *(f"Of the best config: {warning}" for warning in (best.warnings if best else ())),
            context.placement.describe_measurements(),
            context.stands_for() if context.of_one_rank else None,
            _FAST if self.options.fast and best else None,
            packing_note(context.workload.description(), best),
        )
        return Result(
            model=context.workload.name,
            workload=context.workload.description(),
            source=context.workload.source,
            hardware=context.hardware,
            budget=context.budget,
            versions=versions(),
            best=best,
            tiers=tiers,
            trials=tuple(outcome.measurements),
            skipped=outcome.skipped,
            stopped_by="interrupt" if finals.interrupted else outcome.stopped_by,
            space_size=outcome.space_size,
            search_seconds=time.monotonic() - self._start,
            nearest_miss=nearest_miss(outcome.measurements) if best is None else None,
            runner_up=runner_up,
            finalists=finals.verified,
            bound=outcome.bound,
            notes=tuple(filter(None, notes)),
            **vars(around),
            predicted=self.predictions is not None,
        )

    def calibrate(self, finals: Verification) -> None:
        """Improve later predictions by the longest measurements. A CPU's bytes of tensors are exact as they are."""
        # Predictions are of fewer cores than finalists run on, or a part of what is measured is predicted itself.
        if self.predictions is None or self.context.fewer_cores or self.context.of_one_rank:
            return
        if self._had_finished:  # it was learnt from then
            return
        nbytes, seconds, exact = self.predictions.nbytes, self.predictions.seconds, self.context.exact_memory
        alike: dict[tuple[str, ...], list[Measurement]] = {}
        for each in finals.verified:
            alike.setdefault(divided_by(each.config), []).append(each)
        for measured in alike.values():
            found = compare(measured, nbytes, seconds, exact=exact, waiting=self._contention)
            learn(self.context.hardware, found, measured[0].config)

    def _started(self, size: int, refused: int) -> None:
        context, options = self.context, self.options
        trials = min(size - refused, options.trials, FAST_PROBES if options.fast else options.trials)
        started = (context.workload.name, context.hardware, context.budget, size, trials, options.time_limit, refused)
        self._listener(SearchStarted(*started))

    def _narrowed_space(self) -> Space:
        context = self.context
        given = context.workload, context.hardware, context.likely_bytes, self._figures
        seed = self.options.seed
        try:
            space, note = narrowed(context.space, *given, seed=seed)
            if note:
                self.notify(note)

            if "micro_batch_size" not in self.options.set:
                whole = without_micro_batches(space, context.workload)
                if self.options.fast and whole and (found := quick(whole, *given, seed=seed)):
                    return found
                space = with_whole_batches(space, *given, seed=seed)
            return (quick(space, *given, seed=seed) if self.options.fast else None) or space
        except (InputError, ProbeError) as error:
            self.notify(f"the whole space is searched: {error.message}")
            return context.space

    def _figures(self, configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        """Bytes and seconds of each config, predicted in a process of its own; what was asked last is still known."""
        if self._figured and self._figured[0] == configs:
            return self._figured[1]
        timeout = min(PREDICT_SECONDS, PREDICT_SHARE * (self.options.time_limit or math.inf), self._left(EXPLORE_SHARE))
        if timeout <= 0:
            raise ProbeError("no time is left for it.")
        measuring = _FAST_MEASURING if self.options.fast else MEASURING_SECONDS
        # On as many cores as probes run on.
        within = TRACE_SHARE * timeout
        predict = functools.partial(
            predict_all,
            measuring=measuring,
            within=within,
            processes=None,
            host_bytes=self.context.budget.host_bytes,
        )
        arguments = predict, self.context.workload, self.context.hardware, configs
        found: tuple[list[float], list[float]] = self._explorer.run(*arguments, log="estimate.log", timeout=timeout)
        self._figured = configs, found
        return found

    def _predict(self, configs: Sequence[Config]) -> Predictions | None:
        """The estimator's predictions, made in a process of their own; a search can do without."""
        self._listener(PhaseStarted(f"predicting {len(configs):,} configs before the first probe"))
        try:
            nbytes, seconds = self._figures(configs)
        except (InputError, ProbeError) as error:
            self.notify(f"prediction skipped: {error.message}")
            return None
        if unknown := sum(map(math.isnan, nbytes)):
            self.notify(f"{unknown:,} of {len(nbytes):,} configs are not predicted: {_WHY_UNKNOWN}.")
        if unknown < len(nbytes):
            self.predictions = Predictions.of(configs, nbytes, seconds)
        return self.predictions

    def _on_probe(self, number: int, config: Config) -> None:
        tensors = self.predictions.nbytes.get(config, math.nan) if self.predictions else math.nan
        expected = int(tensors) + self.context.hardware.context_bytes if math.isfinite(tensors) else None
        self._listener(ProbeStarted(number, config, expected_bytes=expected))

    def _probe(self, number: int, config: Config, best_seconds: float | None) -> Measurement | None:
        """Measure a config; None where the time was up first. Once something fits, that is sooner."""
        plan = FAST_EXPLORE_PLAN if self.options.fast else EXPLORE_PLAN
        share = EXPLORE_SHARE + OVERRUN_SHARE if best_seconds else 1.0
        plan = dataclasses.replace(plan, best_seconds=best_seconds)
        return self._measure(self._explorer, config, plan, number, share)

    def _measure(
        self, executor: Executor, config: Config, plan: Plan, number: int, share: float = 1.0
    ) -> Measurement | None:
        """Measure a config until this share of the time limit is over; None where it would have taken longer."""
        seconds = max(self._left(share), LEAST_SECONDS)
        plan = dataclasses.replace(plan, seconds=seconds)
        hardware = self.context.hardware
        if self.context.of_one_rank:
            hardware = with_communicators(hardware, config)
        request = Request(config, hardware, self.context.budget, plan)
        measurement = executor.measure(self.context.workload, request, number=number)
        if measurement.outcome is Outcome.TIMED_OUT and measurement.seconds >= seconds:
            return None
        return self._communication.added_to(measurement)

    def _finished(self, measurement: Measurement, best: Measurement | None) -> None:
        self._explored.add(measurement)
        self._listener(ProbeFinished(measurement, best))

    def restored(self) -> bool:
        """Make the run directory again if it was deleted meanwhile; whether it was."""
        if is_new := self._directory.restored():
            self.notify(f"{self._directory.path} was deleted during the search: it is made again, with its journal.")
        return is_new

    def _verify_one(self, finalist: Measurement, kept: Finals) -> Measurement | None:
        self.restored()
        self._listener(ProbeStarted(finalist.number, finalist.config, verifying=True))
        plan = FAST_PLAN if self.options.fast else VERIFY_PLAN
        measurement = self._measure(self._executor, finalist.config, plan, finalist.number)
        if measurement is None:
            return None
        kept.add(measurement)
        self._verified.add(measurement)
        self._listener(ProbeFinished(dataclasses.replace(measurement, verified=measurement.fits), None))
        return measurement

    def _check(self, outcome: SearchOutcome) -> None:
        """Raise an InputError where all configs are refused, for the first's reason; a ProbeError where all failed."""
        if outcome.skipped["refused"] == outcome.space_size:
            workload, hardware = self.context.workload, self.context.hardware
            values = {knob: values[0] for knob, values in self.context.space.knobs.items()}
            reason = techniques.refuse(techniques.canonicalize(values, workload, hardware), workload, hardware)
            if reason:
                raise InputError(f"every config of this search is refused, the first one because of {reason}")
        if not outcome.measurements and outcome.stopped_by == "time":
            message = f"no probe ended within the time limit of {self.options.time_limit:g} s."
            raise ProbeError(message, "Give a longer --time-limit, or see probes/ in the run directory.")
        if outcome.measurements and all(each.outcome is Outcome.FAILED for each in outcome.measurements):
            reason = outcome.measurements[0].reason or "no reason given"
            message = f"every probe failed: {reason.strip().splitlines()[-1]}"
            raise ProbeError(message, "See probes/ in the run directory.")


def run_directory(
    workload: Workload, out: Path | None, *, resume: bool = False
) -> contextlib.AbstractContextManager[RunDirectory]:
    """What enters the run directory: the one that the user gave, or a free one named by model and time."""
    if out:
        return RunDirectory(out, resume=resume)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", workload.name).strip("-")[:_MOST_OF_NAME]
    return free_run_directory(Path("autofit-runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
