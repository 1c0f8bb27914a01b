"""A search for a card that is not here: predicts the space and gives an answer as any search does.

Rough figures rank the space. Only a config's own estimate, which follows a whole step, tells
whether it surely fits: so the first in rank is followed, then the next, until one does. All of it
runs in child processes, as probes do.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, pluralize
from autofit.core.estimate import Estimate, Timeline
from autofit.core.events import Listener, Note, PhaseStarted, SearchStarted
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import Point, frontier, thinned
from autofit.core.result import TIERS, Result, tier, tiers_of
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.processes import parallel_map
from autofit.estimate.rates import rates_for
from autofit.estimate.resting import resting_of
from autofit.estimate.timeline import timeline_of
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for, other_budgets
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note
from autofit.probe import Executor, LocalExecutor
from autofit.report.formatting import packing_note
from autofit.search.enumeration import Enumeration
from autofit.search.pareto import leading
from autofit.search.predictions import Predictions
from autofit.search.ranking import Figures, Ranking
from autofit.tuning.annotations import Annotator
from autofit.tuning.context import about_search, ranking_for
from autofit.tuning.narrowing import BytesAndSeconds, Narrowing
from autofit.tuning.space import space_for
from autofit.tuning.target import estimate_on, structure_traits, target_hardware

_NO_LIMIT = 86_400.0  # seconds, where the user sets no time limit
_ROUNDS = 6  # configs of a tier to follow before none counts as surely fitting
_SURELY_TOO_LARGE = 1.3  # times the usable memory: a rough figure beyond needs no closer look
_HOST_UNKNOWN = (
    "The host of that card is unknown: it is taken to have {:.0f} GiB, and configs that need none "
    "of it are preferred; --host-mem says what it has."
)
_POINTS = 1000  # of each tier, the nearest to its frontier, which is drawn through few of them

Followed = tuple[Estimate, Timeline]


@contextlib.contextmanager
def predicted_search(
    workload: Workload,
    options: SearchOptions,
    directory: RunDirectory,
    listener: Listener,
    start: float,
    *,
    reason: str,
) -> Iterator["PredictedSearch"]:
    """Look at the model and the hardware that is meant, and give the search.

    Its executor ends here.

    Args:
        reason: why nothing can be measured.

    Raises:
        InputError: an option is wrong; UntraceableError: the model cannot be followed without its
        weights.
    """
    if options.gpu is not None:
        # Refuses a card that no search can be for, before anything else is said.
        card_to_search_for(options.gpu)

    listener(Note(no_gpu_note(reason)))
    listener(PhaseStarted("looking at the model"))

    hardware, assumptions = target_hardware(options)
    budget = budget_for(options, hardware)
    if options.host_mem is None:
        assumptions = (*assumptions, _HOST_UNKNOWN.format(budget.host_bytes / GIB))
    assumptions = (*workload.notes, *assumptions)
    for note in assumptions:
        listener(Note(note))

    notes = no_gpu_note(reason), *assumptions
    with LocalExecutor(directory.probes) as executor:
        yield PredictedSearch(executor, workload, hardware, budget, options, listener, start, notes)


class PredictedSearch:
    """Predicts the space roughly, then follows the best configs of each tier. Give it to
    `tuning.pipeline`.

    Attributes:
        workload: with its traits.
        predictions: None: no trial was measured that they could stand beside.
        follows: the best configs are followed in any case.
    """

    predictions: Predictions | None = None
    follows: bool = True

    def __init__(
        self,
        executor: Executor,
        workload: Workload,
        hardware: Hardware,
        budget: Budget,
        options: SearchOptions,
        listener: Listener,
        start: float,
        notes: tuple[str, ...],
    ) -> None:
        self.executor = executor
        self.workload = workload
        self._hardware = hardware
        self._budget = budget
        self._options = options
        self._listener = listener
        self._start = start
        self._notes = notes
        self._cap = budget.cap_bytes(hardware.device, hardware.context_bytes)
        self._ranking = ranking_for(options)
        self._deadline = start + (options.time_limit or _NO_LIMIT)
        self._timelines: dict[str, Timeline] = {}

    def explore(self) -> None:
        """Predict the space, or as much of it as can be."""
        options = self._options
        hardware = self._hardware
        if self.workload.traits is None:
            traits = self._run(structure_traits, hardware, log="look.log")
            self.workload = dataclasses.replace(self.workload, traits=traits)

        narrowing = Narrowing(self.workload, hardware, self._cap, self._predicted, options.seed)
        narrowed_notes: list[str] = []
        space = narrowing.part_of(
            space_for(options, self.workload, hardware),
            settings=options.set,
            fast=False,
            notify=narrowed_notes.append,
        )

        enumeration = Enumeration(space.knobs, techniques.constraints(self.workload, hardware))
        configs = enumeration.configs(options.seed)
        legal = enumeration.count().configs
        self._size = enumeration.count(refused=True).configs
        self._refused = self._size - legal

        self._listener(
            SearchStarted(
                self.workload.name,
                hardware,
                self._budget,
                self._size,
                trials=0,
                time_limit=options.time_limit,
                refused=self._refused,
            )
        )
        for note in narrowed_notes:
            self._note(note)
        if len(configs) < legal:
            drawn = pluralize(len(configs), "config")
            self._note(
                f"The space is too large to predict all of it: {drawn} of it, drawn at random, are."
            )

        self._listener(PhaseStarted(f"predicting {pluralize(len(configs), 'config')}"))
        self._rough = Predictions.of(configs, *self._predicted(configs))
        self._figures = []
        for config, seconds in self._rough.seconds.items():
            nbytes = self._rough.nbytes[config]
            if nbytes > 0 < seconds:
                value = self._rate(seconds) / self._ranking.objective.discount(config)
                self._figures.append(Figures(config, value, nbytes))

    def _rate(self, seconds: float) -> float:
        """Samples a second, of a step that takes so long."""
        return self.workload.effective_batch_size / seconds

    def _note(self, text: str) -> None:
        self._notes = (*self._notes, text)
        self._listener(Note(text))

    def _predicted(self, configs: Sequence[Config]) -> BytesAndSeconds:
        """Bytes and seconds of each config, predicted on as many cores as there are."""
        predict = functools.partial(predict_all, host_bytes=self._budget.host_bytes, processes=None)
        found: BytesAndSeconds = self._run(predict, self._hardware, configs, log="estimate.log")
        return found

    def verify(self) -> None:
        """Follow a training step of the best configs of each tier, until one surely fits."""
        self._tiers = self._best_of_tiers()

    def answer(self) -> Result:
        """What was predicted, without annotations."""
        fits = sum(figures.nbytes <= self._cap for figures in self._figures)
        best = self._best()
        notes = self._notes
        of_data = packing_note(self.workload.description(), best)
        if of_data:
            notes = (*notes, of_data)
        return Result(
            best=None,
            tiers={},
            trials=(),
            skipped={"predicted": len(self._figures) - fits, "refused": self._refused},
            stopped_by="prediction",
            space_size=self._size,
            notes=notes,
            frontier=self._frontier(),
            other_budgets=other_budgets(self._budget, self._hardware),
            predicted=True,
            predicted_best=best,
            predicted_tiers=self._tiers,
            **about_search(self.workload, self._hardware, self._budget, self._start),
        )

    def near(self, result: Result) -> Config | None:
        """The config that is predicted to need least memory."""
        least = min(self._figures, key=attrgetter("nbytes"), default=None)
        return least.config if least else None

    def timelines(self, result: Result, annotator: Annotator) -> Mapping[str, Timeline]:
        """By tier the memory of its best config through a step, which was followed already."""
        return self._timelines

    def learn(self) -> None:
        """Nothing was measured that could be learnt from."""

    def _best_of_tiers(self) -> dict[str, Estimate | None]:
        """The best config of each tier that is predicted to surely fit, else one that may fit."""
        by_tier: dict[str, list[Figures]] = {name: [] for name in TIERS}
        for figures in self._figures:
            by_tier[tier(figures.config)].append(figures)

        growth = {True: 1.0, False: 1.0}
        host_known = self._options.host_mem is not None
        candidates = {}
        for name, of_tier in by_tier.items():
            candidates[name] = Candidates(
                of_tier, self._cap, self._ranking, growth, host_known=host_known
            )

        self._listener(PhaseStarted("following a training step of the best configs"))
        best: dict[str, Estimate | None] = dict.fromkeys(TIERS)
        for _ in range(_ROUNDS):
            asked = {}
            for name, estimate in best.items():
                if not estimate or estimate.verdict != "yes":
                    asked[name] = candidates[name].preferred()
            self._follow(asked, candidates, best)

        asked = {}
        for name, estimate in best.items():
            if not estimate:
                asked[name] = candidates[name].smallest()
        self._follow(asked, candidates, best)
        return best

    def _follow(
        self,
        by_tier: Mapping[str, Config | None],
        candidates: Mapping[str, "Candidates"],
        best: dict[str, Estimate | None],
    ) -> None:
        """Follow a config of each tier.

        Kept as the best of its tier is what surely fits, and the first that may fit.
        """
        asked = {name: config for name, config in by_tier.items() if config}
        if not asked:
            return

        configs = list(asked.values())
        answers = self._run(_follow_all, self._hardware, self._budget, configs, log="estimate.log")
        for (name, config), answer in zip(asked.items(), answers, strict=True):
            candidates[name].learn(config, answer)
            if answer is None or answer[0].verdict == "no":
                continue
            if best[name] is None or answer[0].verdict == "yes":
                best[name], self._timelines[name] = answer

    def _best(self) -> Estimate | None:
        """The one to recommend of the best of all tiers, of those that surely fit if any does."""
        estimates = [estimate for estimate in self._tiers.values() if estimate]
        sure = [estimate for estimate in estimates if estimate.verdict == "yes"]
        estimates = sure or estimates

        figures = []
        for estimate in estimates:
            rate = estimate.samples_per_second or 0.0
            value = rate / self._ranking.objective.discount(estimate.config)
            figures.append(Figures(estimate.config, value, estimate.allocated_bytes))
        index = self._ranking.preferred(figures)
        return None if index is None else estimates[index]

    def _frontier(self) -> dict[str, tuple[Point, ...]]:
        """By tier the most throughput for each amount of memory, by rough figures."""
        length = self.workload.sequence_length if self.workload.unit == "tokens" else None
        points: list[Point] = []
        for config in leading(self._rough, _POINTS):
            rate = self._rate(self._rough.seconds[config])
            nbytes = int(self._rough.nbytes[config]) + self._hardware.context_bytes
            tokens = rate * length if length else None
            points.append(Point(config, nbytes, rate, tokens, measured=False))

        found = {}
        for name in tiers_of(points):
            of_tier = [point for point in points if tier(point.config) == name]
            found[name] = thinned(frontier(of_tier))
        return found

    def _run(self, function: Callable[..., Any], *arguments: Any, log: str) -> Any:
        """Call a function of the workload in a child process, within the time limit."""
        left = max(1.0, self._deadline - time.monotonic())
        return self.executor.run(function, self.workload, *arguments, log=log, timeout=left)


class Candidates:
    """The configs of a tier that may be its best.

    Args:
        growth: the largest ratio seen of an estimate's upper end to its rough figure, for compiled
            configs (True), which are predicted less well, and others; all tiers share and update
            it.
        host_known: whether the user said what memory the host has.
    """

    def __init__(
        self,
        figures: Sequence[Figures],
        cap: int,
        ranking: Ranking,
        growth: dict[bool, float],
        *,
        host_known: bool,
    ) -> None:
        self._left = {row.config: row for row in figures}  # those not followed yet
        self._cap = cap
        self._ranking = ranking
        self._growth = growth
        self._host_known = host_known

    def preferred(self) -> Config | None:
        """The config to recommend among those not followed yet that may surely fit.

        On an unknown host, configs that keep part of the training there come last.
        """
        fitting = []
        on_device = []
        for config, figures in self._left.items():
            if figures.nbytes * self._growth[_is_compiled(config)] <= self._cap:
                fitting.append(figures)
                if not techniques.keeps_on_host(config):
                    on_device.append(figures)

        if on_device and not self._host_known:
            fitting = on_device
        index = self._ranking.preferred(fitting)
        return None if index is None else fitting[index].config

    def smallest(self) -> Config | None:
        """The config left that needs least memory, unless that is hopeless."""
        least = min(self._left.values(), key=attrgetter("nbytes"), default=None)
        if least is None or least.nbytes > _SURELY_TOO_LARGE * self._cap:
            return None
        return least.config

    def learn(self, config: Config, answer: Followed | None) -> None:
        """Take note of a config that was followed; None where it could not be."""
        rough = self._left.pop(config)
        if answer is None:
            return

        estimate, _ = answer
        growth = (estimate.high - estimate.breakdown["context"]) / rough.nbytes
        is_compiled = _is_compiled(config)
        self._growth[is_compiled] = max(self._growth[is_compiled], growth)


def _is_compiled(config: Config) -> bool:
    return config.compile != "none"


def _follow_all(
    workload: Workload, hardware: Hardware, budget: Budget, configs: list[Config]
) -> list[Followed | None]:
    """The estimate of each config and the memory through its step; None where it cannot be
    traced."""

    def follow(config: Config) -> Followed | None:
        try:
            traced = trace(workload, config, hardware)
        except AutofitError:
            return None

        resting = resting_of(traced, workload, hardware)
        estimate = estimate_on(traced, workload, hardware, budget)
        line = timeline_of(traced, hardware, rates=rates_for(hardware))
        return (
            dataclasses.replace(estimate, resting=resting),
            dataclasses.replace(line, resting=resting, bottleneck=estimate.bottleneck),
        )

    processes = 1 if len(configs) < 2 else None
    with parallel_map(follow, processes) as follow_each:
        return follow_each(configs)
