"""A search by measurements: probes explore the space, and finalists are verified in longer runs."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.environment import versions
from autofit.core.errors import InputError, ProbeError
from autofit.core.estimate import Timeline
from autofit.core.events import (
    Listener,
    Note,
    PhaseStarted,
    ProbeFinished,
    ProbeStarted,
    SearchStarted,
)
from autofit.core.hardware import Hardware
from autofit.core.layout import divided_by
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import SearchOptions
from autofit.core.result import Result, tier
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate.calibration import compare, learn
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
from autofit.report.formatting import (
    close_call_note,
    drift_note,
    little_seen_note,
    misled_note,
    packing_note,
)
from autofit.search.concurrency import Threaded
from autofit.search.finals import Finals
from autofit.search.journal import (
    Journal,
    check_resumable,
    identity_of_space,
    measured_configs,
)
from autofit.search.pareto import Evidence, pareto_report
from autofit.search.predictions import Predictions
from autofit.search.ranking import nearest_miss
from autofit.search.space import Space
from autofit.search.study import Limits, SearchProblem, search
from autofit.search.verification import Verification, confirm, verify
from autofit.tuning.annotations import Annotator
from autofit.tuning.context import Context, about_search, context_of, ranking_for
from autofit.tuning.forecast import Forecast
from autofit.tuning.narrowing import Narrowing
from autofit.tuning.stand_in import Communication, with_communicators
from autofit.tuning.warm_start import WarmStart, subject_of

# Shares of a time limit: when exploring ends, how much longer a probe may take that runs then, and
# when no finalist is begun any more that would take longer; the rest is for the report.
EXPLORE_SHARE = 0.7
OVERRUN_SHARE = 0.1
VERIFY_SHARE = 0.9
# Probes differ by more than steps of one do. Eight configs of tiny-llama, each measured in five
# processes on 2 busy cores: the medians of the first 2, 3, 4, 5 and 8 steps all differ by 7 to 8 %
# between processes. Of long steps few are enough: four whole ones of an 8B took 25 s on an H200.
_LONG = 1.5  # seconds
EXPLORE_PLAN = Plan(min_steps=2, max_seconds=0.75, long_seconds=_LONG)
VERIFY_PLAN = Plan(min_steps=4, max_steps=50, max_seconds=1.5, compose=False, long_seconds=_LONG)
# A quick search is as short as the search of a batch-size finder: few probes, until no other config
# is expected to be much faster.
FAST_PROBES = 2
FAST_TOLERANCE = 0.1
FAST_EXPLORE_PLAN = Plan(min_steps=2, max_seconds=0.5, long_seconds=_LONG)
FAST_PLAN = Plan(max_seconds=1.0, compose=False, long_seconds=_LONG)
_FAST = (
    "A quick search (--fast) looks at usual values, and measures few: one of each tier that may "
    "win, and others that are expected to be much better. The best config was confirmed by one "
    "longer run, and not measured against another again. A search without it may find a faster one."
)
_FINISHED = (
    "this search had finished: its answer is given again. More --trials, another --tolerance or "
    "another --time-limit go on with it."
)
NOTABLE_DRIFT = 0.05  # a smaller one lies within the difference of two probes of one config


@contextlib.contextmanager
def measured_search(
    workload: Workload,
    options: SearchOptions,
    directory: RunDirectory,
    listener: Listener,
    start: float,
) -> Iterator["MeasuredSearch"]:
    """Look at the model and the device, and give the search with its executor, which ends here.

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here.
    """
    listener(PhaseStarted("looking at the model and the device"))
    if options.resume and not directory.journal.exists():  # the search before was killed early
        listener(Note(f"nothing was measured in {directory.path} before: the search starts anew."))

    until = start + (options.time_limit or math.inf)
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(_executor(options, directory, listener, until))
        executor.end_by(until)
        context = context_of(workload, options, executor, directory.journal)

        if context.ranks and executor.own_ranks is None:
            stack.close()  # its memory is needed
            executor = stack.enter_context(
                GangExecutor(context.ranks, directory.probes, options.probe_timeout)
            )
            executor.end_by(until)

        measures_link = options.link is None and context.hardware == context.measured_on
        if context.ranks and measures_link:
            context = context.linked_by(executor.link(context.hardware, context.budget))

        yield MeasuredSearch(context, executor, directory, listener, start)


def _executor(
    options: SearchOptions, directory: RunDirectory, listener: Listener, until: float
) -> Executor:
    """What inspects the model; on a cluster, what measures as well."""
    if options.executor == "local":
        return LocalExecutor(directory.probes, options.probe_timeout)

    cluster = RayExecutor(options, directory.probes, lambda text: listener(Note(text)), until)
    listener(Note(cluster.describe()))
    return cluster


class MeasuredSearch:
    """Explores and verifies by probes. Give it to `tuning.pipeline`.

    Attributes:
        workload: with its traits.
        predictions: of the configs of the space; None before exploring, and where nothing could be
            predicted.
        follows: whether there is time to follow steps for the report.
    """

    def __init__(
        self,
        context: Context,
        executor: Executor,
        directory: RunDirectory,
        listener: Listener,
        start: float,
    ) -> None:
        self.context = context
        self.workload = context.workload
        self.options = context.options
        self.executor = executor
        self.predictions: Predictions | None = None
        self.follows = not context.options.fast

        self._ranking = ranking_for(context.options)
        self._explorer = executor
        self._directory = directory
        self._listener = listener
        self._start = start
        self._had_finished = False  # before this process began
        # The share of the time in which something waited for a processor while finalists ran.
        self._contention = 1.0
        self._communication = Communication(context.workload, context.hardware, executor)

        self._explore_store = self._store_for(context.placement.hardware(context.measured_on))
        self._verify_store = self._explore_store
        if context.fewer_cores:
            self._verify_store = self._store_for(context.measured_on)

        for note in context.notes():
            self.notify(note)

    def notify(self, message: str) -> None:
        self._listener(Note(message))

    def _left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time limit is over."""
        return self._start + share * (self.options.time_limit or math.inf) - time.monotonic()

    def _store_for(self, hardware: Hardware) -> WarmStart:
        """The earlier measurements on some hardware."""
        context = self.context
        subject = None
        if self.options.store:
            subject = subject_of(context.workload, hardware, versions(), context.predicted_links)
        return WarmStart(
            subject,
            context.cap_bytes,
            exact=context.exact_memory,
            run=self._directory.path,
            notify=self.notify,
            hardware=hardware,
        )

    def explore(self) -> None:
        """Probe configs of the space until a limit is reached."""
        context = self.context
        options = self.options
        journal = Journal(
            self._directory.journal,
            context.identity(),
            context.budget.device_bytes,
            notify=self.notify,
            lines=self._directory.lines,
            restored=self._directory.restored,
        )
        with contextlib.ExitStack() as stack:
            devices = context.placement.devices
            places = context.placement.places[: options.trials * devices]
            if places:
                pool = PoolExecutor(places, self._directory.probes, options.probe_timeout, devices)
                pool.end_by(self.executor.until)
                self._explorer = stack.enter_context(pool)
            else:
                self._explorer = stack.enter_context(self.executor.explorer())

            forecast = Forecast(
                context,
                options,
                self._explorer,
                self._listener,
                measured=functools.partial(measured_configs, self._directory.journal),
                seconds_left=lambda: self._left(EXPLORE_SHARE),
            )
            # Before predictions, which take long.
            between = forecast.values_between(context.space.knobs)
            check_resumable(journal, identity_of_space(context.space.knobs, between))
            space = self._narrowed_space(forecast)
            problem = SearchProblem(
                probe=self._probe,
                constraints=techniques.constraints(context.workload, context.hardware),
                memory_order=_memory_order,
                on_finished=self._finished,
                on_started=self._started,
                predict=lambda configs: self._predict(forecast, configs, space),
                between=forecast.values_between(space.knobs),
                prior_measurements=self._explore_store.prior_measurements(resumed=options.resume),
                on_probe=self._on_probe,
                concurrency=functools.partial(
                    Threaded, room=self._explorer.free_slots, give_up=self._explorer.give_up
                ),
                ranking=self._ranking,
            )
            self._outcome = search(
                space, problem, limits=self._limits(), journal=journal, seed=options.seed
            )

        if self._outcome.stopped_by != "interrupt":
            self._check()
        finals = self._outcome.finals
        self._had_finished = finals is not None and finals.finished

    def _limits(self) -> Limits:
        """When exploring ends, counted from now."""
        context = self.context
        options = self.options
        seconds = None
        if options.time_limit:
            seconds = max(self._left(EXPLORE_SHARE), LEAST_SECONDS)

        tolerance = options.tolerance
        if options.fast:
            tolerance = max(tolerance, FAST_TOLERANCE)

        return Limits(
            options.trials,
            seconds,
            context.cap_bytes,
            context.context_bytes,
            tolerance=tolerance,
            quick=FAST_PROBES if options.fast else None,
            latest=self._left(),
            asked_seconds=options.time_limit,
        )

    def verify(self) -> None:
        """Measure the finalists again, in longer runs."""
        outcome = self._outcome
        if outcome.stopped_by == "interrupt":
            self._finals = Verification(outcome.measurements, interrupted=True)
            return

        kept = outcome.finals
        assert kept, "every search has a place for its finals"
        if self._had_finished:
            self.notify(_FINISHED)

        measure = functools.partial(self._verify_one, kept=kept)
        given = outcome.measurements, outcome.posterior, measure, self._ranking

        contention = Contention()
        if self.options.fast:
            finals = confirm(*given, before=kept.verified)
        else:
            finals = verify(
                *given,
                seconds_left=lambda: self._left(VERIFY_SHARE),
                elsewhere=self.context.fewer_cores,
                before=kept.verified,
                finished=kept.finished,
            )
            self._contention = contention.share()

        has_ended = bool(finals.verified) or not finals.out_of_time
        if has_ended and not finals.interrupted:
            kept.finish()
        self._finals = finals

    def answer(self) -> Result:
        """What was found, without annotations."""
        context = self.context
        outcome = self._outcome
        finals = self._finals

        ranked = self._ranking.finalists(finals.candidates())
        best, runner_up, *_ = (*ranked, None, None)

        tiers = self._ranking.best_of_tiers(finals.of_tiers(elsewhere=context.fewer_cores))
        if best:
            tiers[tier(best.config)] = best  # not an explored config that promised more

        evidence = Evidence(
            best,
            (*finals.explored, *finals.verified),
            finals.failed,
            outcome.surrogate,
            self.predictions,
            context.budget,
            context.hardware,
            context.workload,
        )
        others = other_budgets(context.budget, context.hardware)
        around = pareto_report(evidence, others=others, tolerance=self.options.tolerance)

        return Result(
            best=best,
            tiers=tiers,
            trials=outcome.measurements,
            skipped=outcome.skipped,
            stopped_by="interrupt" if finals.interrupted else outcome.stopped_by,
            space_size=outcome.space_size,
            nearest_miss=None if best else nearest_miss(outcome.measurements),
            runner_up=runner_up,
            finalists=finals.verified,
            bound=outcome.bound,
            notes=self._notes(best),
            predicted=self.predictions is not None,
            **vars(around),
            **about_search(context.workload, context.hardware, context.budget, self._start),
        )

    def _notes(self, best: Measurement | None) -> tuple[str, ...]:
        """What the user should know of the answer."""
        context = self.context
        outcome = self._outcome
        notes: list[str | None] = [*context.budget_notes]

        if outcome.slowdown > NOTABLE_DRIFT:
            notes.append(drift_note(outcome.slowdown))
        if outcome.prediction_bias:
            notes.append(misled_note(outcome.prediction_bias))
        if best:
            close = self._ranking.close_calls(best, self._finals.latest())
            notes.append(close_call_note(len(close), self.options.tolerance))
            notes += [f"Of the best config: {warning}" for warning in best.warnings]

        notes.append(little_seen_note(outcome.little_seen))
        notes.append(context.placement.describe_measurements())
        if context.of_one_rank:
            notes.append(context.stands_for())
        if self.options.fast and best:
            notes.append(_FAST)
        notes.append(packing_note(context.workload.description(), best))
        return tuple(filter(None, notes))

    def near(self, result: Result) -> Config | None:
        """A config that nearly fits, where none does; else any that was measured."""
        nearest = result.nearest_miss or next(iter(result.trials), None)
        return nearest.config if nearest else None

    def timelines(self, result: Result, annotator: Annotator) -> Mapping[str, Timeline]:
        """By tier the memory of its best config through a step."""
        if result.best:
            self._listener(
                PhaseStarted("following a training step of the best configs, for the report")
            )
        return annotator.timelines(result)

    def learn(self) -> None:
        """Improve later predictions by the longest measurements.

        A CPU's bytes of tensors are exact as they are.
        """
        # Finalists must have run on as many cores as were predicted, and be measured in every part.
        if self.predictions is None or self.context.fewer_cores or self.context.of_one_rank:
            return
        if self._had_finished:  # they were learnt from then
            return

        alike: dict[tuple[str, ...], list[Measurement]] = {}
        for measurement in self._finals.verified:
            alike.setdefault(divided_by(measurement.config), []).append(measurement)

        for measured in alike.values():
            found = compare(
                measured,
                self.predictions.nbytes,
                self.predictions.seconds,
                exact=self.context.exact_memory,
                waiting=self._contention,
            )
            learn(self.context.hardware, found, measured[0].config)

    def _started(self, size: int, refused: int) -> None:
        context = self.context
        trials = min(size - refused, self.options.trials)
        if self.options.fast:
            trials = min(trials, FAST_PROBES)

        self._listener(
            SearchStarted(
                context.workload.name,
                context.hardware,
                context.budget,
                size,
                trials,
                self.options.time_limit,
                refused,
            )
        )

    def _narrowed_space(self, forecast: Forecast) -> Space:
        """The space, or the part of a large or quick one that is predicted to be worth it."""
        context = self.context
        narrowing = Narrowing(
            context.workload,
            context.hardware,
            context.likely_bytes,
            forecast.figures,
            self.options.seed,
        )
        try:
            return narrowing.part_of(
                context.space,
                settings=self.options.set,
                fast=self.options.fast,
                notify=self.notify,
            )
        except (InputError, ProbeError) as error:
            self.notify(f"the whole space is searched: {error.message}")
            return context.space

    def _predict(
        self, forecast: Forecast, configs: Sequence[Config], space: Space
    ) -> Predictions | None:
        self.predictions = forecast.predictions(configs, space.knobs)
        return self.predictions

    def _on_probe(self, number: int, config: Config) -> None:
        expected = None
        if self.predictions:
            tensors = self.predictions.nbytes.get(config, math.nan)
            if math.isfinite(tensors):
                expected = int(tensors) + self.context.hardware.context_bytes
        self._listener(ProbeStarted(number, config, expected_bytes=expected))

    def _probe(self, number: int, config: Config, best_seconds: float | None) -> Measurement | None:
        """Measure a config; None where the time was up first.

        Until something fits, a probe may use all of the time limit.
        """
        plan = FAST_EXPLORE_PLAN if self.options.fast else EXPLORE_PLAN
        plan = dataclasses.replace(plan, best_seconds=best_seconds)
        share = EXPLORE_SHARE + OVERRUN_SHARE if best_seconds else 1.0
        return self._measure(self._explorer, config, plan, number, share)

    def _measure(
        self, executor: Executor, config: Config, plan: Plan, number: int, share: float = 1.0
    ) -> Measurement | None:
        """Measure a config until this share of the time limit is over.

        None where it would have taken longer.
        """
        seconds = max(self._left(share), LEAST_SECONDS)
        plan = dataclasses.replace(plan, seconds=seconds)
        hardware = self.context.hardware
        if self.context.of_one_rank:
            hardware = with_communicators(hardware, config)

        request = Request(config, hardware, self.context.budget, plan)
        measurement = executor.measure(self.workload, request, number=number)
        if measurement.outcome is Outcome.TIMED_OUT and measurement.seconds >= seconds:
            return None
        return self._communication.added_to(measurement)

    def _finished(self, measurement: Measurement, best: Measurement | None) -> None:
        self._explore_store.add(measurement)
        self._listener(ProbeFinished(measurement, best))

    def _verify_one(self, finalist: Measurement, kept: Finals) -> Measurement | None:
        """Measure a finalist once more and keep it; None where the time was up first."""
        self._directory.restored()
        self._listener(ProbeStarted(finalist.number, finalist.config, verifying=True))
        plan = FAST_PLAN if self.options.fast else VERIFY_PLAN
        measurement = self._measure(self.executor, finalist.config, plan, finalist.number)
        if measurement is None:
            return None

        kept.add(measurement)
        self._verify_store.add(measurement)
        verified = dataclasses.replace(measurement, verified=measurement.fits)
        self._listener(ProbeFinished(verified, None))
        return measurement

    def _check(self) -> None:
        """Raise an InputError where all configs are refused, a ProbeError where all probes
        failed."""
        outcome = self._outcome
        if outcome.skipped["refused"] == outcome.space_size:
            about = self.workload, self.context.hardware
            first = {knob: values[0] for knob, values in self.context.space.knobs.items()}
            reason = techniques.refuse(techniques.canonicalize(first, *about), *about)
            if reason:
                raise InputError(
                    f"every config of this search is refused, the first one because of {reason}"
                )

        if not outcome.measurements:
            if outcome.stopped_by == "time":
                raise ProbeError(
                    f"no probe ended within the time limit of {self.options.time_limit:g} s.",
                    "Give a longer --time-limit, or see probes/ in the run directory.",
                )
            return

        if all(trial.outcome is Outcome.FAILED for trial in outcome.measurements):
            reason = outcome.measurements[0].reason or "no reason given"
            raise ProbeError(
                f"every probe failed: {reason.strip().splitlines()[-1]}",
                "See probes/ in the run directory.",
            )


def _memory_order(knob: str, value: Value) -> int | None:
    return techniques.technique_named(knob).memory_order(value)
