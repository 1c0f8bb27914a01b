"""A search for a card that is not here: predicts the whole space and writes the answer as any search does.

Rough figures rank the space. Only a config's own estimate, which follows a whole step, tells whether it surely fits: so
the first in rank is followed, then the next, until one does. All of it runs in child processes, as probes do.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofit import techniques
from autofit.core.beginning import began
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import AutofitError, NoDeviceError, counted
from autofit.core.estimate import Estimate, Timeline
from autofit.core.events import Listener, Note, PhaseStarted, SearchStarted
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import Point, frontier, thinned
from autofit.core.result import TIERS, Result, tier, tiers_of
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.processes import parallel_map
from autofit.estimate.rates import rates_for
from autofit.estimate.resting import resting_of
from autofit.estimate.timeline import timeline_of
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for, other_budgets
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note, why_no_gpu
from autofit.probe import LocalExecutor
from autofit.report.formatting import packing_note
from autofit.search.enumeration import Enumeration
from autofit.search.pareto import leading
from autofit.search.predictions import Predictions
from autofit.search.ranking import Figures, preferred
from autofit.tuning.artifacts import (
    follow_devices,
    layers_for_exports,
    make_record,
    with_remedies,
    write_artifacts,
    write_report,
)
from autofit.tuning.context import Judging
from autofit.tuning.narrowing import narrowed, with_whole_batches
from autofit.tuning.run import run_directory, run_search
from autofit.tuning.space import space_for
from autofit.tuning.target import estimate_on, structure_traits, target_hardware

_NO_LIMIT = 86_400.0  # seconds, where the user sets no time limit
_ROUNDS = 6  # configs of a tier to follow before none counts as surely fitting
_SURELY_TOO_LARGE = 1.3  # times the usable memory: a rough figure beyond needs no closer look
_HOST_UNKNOWN = (
    "The host of that card is unknown: it is taken to have {:.0f} GiB, and configs that need none of it are preferred; "
    "--host-mem says what it has."
)
_POINTS = 1000  # of each tier, the nearest to its frontier, which is drawn through few of them

Followed = tuple[Estimate, Timeline]


def search_or_predict(
    workload: Workload, options: SearchOptions, listener: Listener | None = None, *, judge: Judging | None = None
) -> Result:
    """Search; for a card where no CUDA device is here, predict what the search would find.

    Raises:
        InputError: an option is wrong; ProbeError: probes cannot run here, or the prediction took too long.
    """
    reason = why_no_gpu() if options.names_a_card else None
    if reason is None or torch.cuda.is_available():
        try:
            return run_search(workload, options, listener, judge=judge)
        except NoDeviceError:
            if not options.names_a_card:
                raise
            reason = "there is no CUDA device here"
    return predicted_search(workload, options, listener or (lambda _: None), reason=reason)


def predicted_search(workload: Workload, options: SearchOptions, listener: Listener, *, reason: str) -> Result:
    """Predict what a search would find where nothing can be measured for a `reason`, and write the files of a search.

    Raises:
        InputError: an option is wrong; UntraceableError: the model cannot be followed without its weights;
        ProbeError: the prediction took longer than the time limit.
    """
    start = began()
    if options.gpu is not None:
        card_to_search_for(options.gpu)  # refuses a card that no search can be for, before anything else is said

    def notify(text: str) -> None:
        listener(Note(text))

    notify(no_gpu_note(reason))
    listener(PhaseStarted("looking at the model"))
    hardware, assumptions = target_hardware(options)
    budget = budget_for(options, hardware)
    host = [_HOST_UNKNOWN.format(budget.host_bytes / GIB)] if options.host_mem is None else []
    assumptions = (*workload.notes, *assumptions, *host)
    with run_directory(workload, options.out) as directory:
        for note in assumptions:
            notify(note)
        with LocalExecutor(directory.probes) as executor:
            space = _Space(executor, workload, hardware, budget, options=options, listener=listener)
            result = follow_devices(space.result(), space.workload, options, executor)
            result = with_remedies(result, space.leanest(), space.workload, options, executor)
            layers = layers_for_exports(result, space.workload, executor)
        directory.restored()
        of_data = packing_note(result.workload, result.predicted_best)
        notes = (no_gpu_note(reason), *assumptions, *result.notes, *([of_data] if of_data else []))
        result = dataclasses.replace(result, notes=notes, search_seconds=time.monotonic() - start)
        listener(PhaseStarted("writing the result and the report"))
        result = write_artifacts(result, space.workload, directory, notify=notify, layers=layers)
        return write_report(make_record(result, options, None, space.timelines), directory, notify=notify)


class _Space:
    """The predicted space of a search, and the best configs of it."""

    def __init__(
        self,
        executor: LocalExecutor,
        workload: Workload,
        hardware: Hardware,
        budget: Budget,
        *,
        options: SearchOptions,
        listener: Listener,
    ) -> None:
        self._executor, self._hardware, self._budget = executor, hardware, budget
        self._options, self._listener = options, listener
        self._cap = budget.cap_bytes(hardware.device, hardware.context_bytes)
        self._deadline = began() + (options.time_limit or _NO_LIMIT)
        self.timelines: dict[str, Timeline] = {}
        self.workload = workload
        if workload.traits is None:
            traits = self._run(structure_traits, hardware, log="look.log")
            self.workload = dataclasses.replace(workload, traits=traits)
        # On as many cores as there are.
        predict = functools.partial(predict_all, host_bytes=budget.host_bytes, processes=None)

        def predicted(configs: Sequence[Config]) -> Any:
            return self._run(predict, hardware, configs, log="estimate.log")

        space = space_for(options, self.workload, hardware)
        arguments = space, self.workload, hardware, self._cap, predicted
        space, of_layouts = narrowed(*arguments, seed=options.seed)
        if "micro_batch_size" not in options.set:
            space = with_whole_batches(space, *arguments[1:], seed=options.seed)
        enumeration = Enumeration(space.knobs, techniques.constraints(self.workload, hardware))
        configs = enumeration.configs(options.seed)
        self._size, legal = enumeration.count(refused=True).configs, enumeration.count().configs
        self._refused = self._size - legal
        started = (workload.name, hardware, budget, self._size, 0, options.time_limit, self._refused)
        listener(SearchStarted(*started))
        self._notes: tuple[str, ...] = ()
        if of_layouts:
            self._notes = (of_layouts,)
            listener(Note(of_layouts))
        if len(configs) < legal:
            drawn = counted(len(configs), "config")
            self._notes += (f"The space is too large to predict all of it: {drawn} of it, drawn at random, are.",)
            listener(Note(self._notes[-1]))
        listener(PhaseStarted(f"predicting {counted(len(configs), 'config')}"))
        nbytes, seconds = predicted(configs)
        self._rough = Predictions.of(configs, nbytes, seconds)
        samples, rows = self.workload.effective_batch_size, zip(configs, nbytes, seconds, strict=True)
        self._figures = [Figures(config, samples / taken, size) for config, size, taken in rows if size > 0 < taken]

    def result(self) -> Result:
        """The result, complete but for the time it took."""
        tiers = self._best_of_tiers()
        fits = sum(figures.nbytes <= self._cap for figures in self._figures)
        return Result(
            model=self.workload.name,
            workload=self.workload.description(),
            source=self.workload.source,
            hardware=self._hardware,
            budget=self._budget,
            versions=versions(),
            best=None,
            tiers={},
            trials=(),
            skipped={"predicted": len(self._figures) - fits, "refused": self._refused},
            stopped_by="prediction",
            space_size=self._size,
            search_seconds=0.0,
            notes=self._notes,
            frontier=self._frontier(),
            other_budgets=other_budgets(self._budget, self._hardware),
            predicted=True,
            predicted_best=self._best([estimate for estimate in tiers.values() if estimate]),
            predicted_tiers=tiers,
        )

    def leanest(self) -> Config | None:
        """The config that is predicted to need least memory."""
        least = min(self._figures, key=lambda each: each.nbytes, default=None)
        return least.config if least else None

    def _best_of_tiers(self) -> dict[str, Estimate | None]:
        """The best config of each tier that is predicted to surely fit, or else one that may fit."""
        growth = {True: 1.0, False: 1.0}
        host_known = self._options.host_mem is not None
        candidates = {}
        for name in TIERS:
            figures = [each for each in self._figures if tier(each.config) == name]
            candidates[name] = Candidates(figures, self._cap, growth, host_known=host_known)
        self._listener(PhaseStarted("following a training step of the best configs"))
        best: dict[str, Estimate | None] = dict.fromkeys(TIERS)

        def follow(configs: dict[str, Config]) -> None:
            """Keep what surely fits, and the first that may fit."""
            if not configs:
                return
            answers = self._run(_follow_all, self._hardware, self._budget, list(configs.values()), log="estimate.log")
            for (name, config), answer in zip(configs.items(), answers, strict=True):
                candidates[name].learn(config, answer)
                if answer and answer[0].verdict != "no" and (best[name] is None or answer[0].verdict == "yes"):
                    best[name], self.timelines[name] = answer

        for _ in range(_ROUNDS):
            undecided = (name for name, estimate in best.items() if not estimate or estimate.verdict != "yes")
            ranked = {name: candidates[name].preferred(self._options.tolerance) for name in undecided}
            follow({name: config for name, config in ranked.items() if config})
        smallest = {name: candidates[name].smallest() for name, estimate in best.items() if not estimate}
        follow({name: config for name, config in smallest.items() if config})
        return best

    def _best(self, estimates: list[Estimate]) -> Estimate | None:
        estimates = [each for each in estimates if each.verdict == "yes"] or estimates
        figures = [Figures(each.config, each.samples_per_second or 0.0, each.allocated_bytes) for each in estimates]
        index = preferred(figures, tolerance=self._options.tolerance, fidelity=techniques.fidelity)
        return None if index is None else estimates[index]

    def _frontier(self) -> dict[str, tuple[Point, ...]]:
        length = self.workload.sequence_length if self.workload.unit == "tokens" else None
        points: list[Point] = []
        for config in leading(self._rough, _POINTS):
            rate = self.workload.effective_batch_size / self._rough.seconds[config]
            nbytes = int(self._rough.nbytes[config]) + self._hardware.context_bytes
            points.append(Point(config, nbytes, rate, rate * length if length else None, measured=False))
        found = ((name, [each for each in points if tier(each.config) == name]) for name in tiers_of(points))
        return {name: thinned(frontier(of_tier)) for name, of_tier in found}

    def _run(self, function: Callable[..., Any], *arguments: Any, log: str) -> Any:
        """Call a function of the workload in a child process, within the time limit."""
        left = max(1.0, self._deadline - time.monotonic())
        return self._executor.run(function, self.workload, *arguments, log=log, timeout=left)


class Candidates:
    """The configs of a tier that may be its best.

    Args:
        growth: the largest ratio seen of an estimate's upper end to its rough figure, for compiled configs (True),
            which are predicted less well, and others; all tiers share and update it.
        host_known: whether the user said what memory the host has.
    """

    def __init__(self, figures: Sequence[Figures], cap: int, growth: dict[bool, float], *, host_known: bool) -> None:
        self._figures, self._cap, self._growth, self._host_known = figures, cap, growth, host_known
        self._followed: set[Config] = set()

    def preferred(self, tolerance: float) -> Config | None:
        """The config to recommend among those not followed yet that may surely fit.

        On an unknown host, configs that keep part of the training there come last.
        """
        left = [each for each in self._figures if each.config not in self._followed]
        left = [each for each in left if each.nbytes * self._growth[each.config.compile != "none"] <= self._cap]
        if not self._host_known:
            left = [each for each in left if not techniques.keeps_on_host(each.config)] or left
        index = preferred(left, tolerance=tolerance, fidelity=techniques.fidelity)
        return None if index is None else left[index].config

    def learn(self, config: Config, answer: Followed | None) -> None:
        """Take note of a config that was followed; None where it could not be."""
        self._followed.add(config)
        if answer is not None:
            rough = next(each.nbytes for each in self._figures if each.config == config)
            growth, compiled = (answer[0].high - answer[0].breakdown["context"]) / rough, config.compile != "none"
            self._growth[compiled] = max(self._growth[compiled], growth)

    def smallest(self) -> Config | None:
        """The config left that needs least memory, unless that is hopeless."""
        left = [each for each in self._figures if each.config not in self._followed]
        least = min(left, key=lambda each: each.nbytes, default=None)
        return least.config if least and least.nbytes <= _SURELY_TOO_LARGE * self._cap else None


def _follow_all(workload: Workload, hardware: Hardware, budget: Budget, configs: list[Config]) -> list[Followed | None]:
    """The estimate of each config and the memory through its step; None where it cannot be traced."""

    def follow(config: Config) -> Followed | None:
        try:
            traced = trace(workload, config, hardware)
        except AutofitError:
            return None
        resting = resting_of(traced, workload, hardware)
        estimate = dataclasses.replace(estimate_on(traced, workload, hardware, budget), resting=resting)
        line = timeline_of(traced, hardware, rates=rates_for(hardware))
        return estimate, dataclasses.replace(line, resting=resting, bottleneck=estimate.bottleneck)

    with parallel_map(follow, None if len(configs) > 1 else 1) as follow_each:
        return follow_each(configs)
