"""A search for a card that is not here: the whole space is predicted, and the answer written as that of any search.

The rough figures of a space rank it; whether a config fits surely is told by its own estimate alone, which follows a
whole step. So the one that ranks first is followed, and where it does not fit surely the next one. All of it runs in
child processes, as probes do.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autofit import techniques
from autofit.api.estimate import hardware_for, on_device
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import AutofitError, NoDeviceError, counted
from autofit.core.estimate import Estimate, Timeline
from autofit.core.events import Note, PhaseStarted, SearchStarted
from autofit.core.hardware import Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import Point, frontier, thinned
from autofit.core.result import TIERS, Result, tier
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Traits, Workload
from autofit.estimate import predict_all, rates_for, timeline_of, trace
from autofit.estimate.processes import spread
from autofit.hardware.budgets import budget_for, other_budgets
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note, why_no_gpu
from autofit.probe import LocalExecutor
from autofit.search import Enumeration, Figures, Predictions, preferred
from autofit.search.foresight import leading
from autofit.training.inspect import inspect_workload
from autofit.tuning.artifacts import hand_over, hand_over_report
from autofit.tuning.record import unmeasured
from autofit.tuning.run import Listener, new_run_name, run_search
from autofit.tuning.space import space_for

_PATIENCE = 86_400.0  # seconds for what nobody has set a limit to
_ROUNDS = 6  # configs of a tier that are followed at most before none is said to fit surely
_SURELY_TOO_LARGE = 1.3  # times what may be used: a rough figure beyond needs no closer look
_HOST_UNKNOWN = (
    "Nothing is known of that card's host: what fits without host memory is preferred to offloading; --host-mem tells."
)
_POINTS = 1000  # of each tier, the nearest to its frontier, which is drawn through few of them


def search_or_predict(workload: Workload, options: SearchOptions, listener: Listener | None = None) -> Result:
    """A search; where it is for a card and no CUDA device is here, what is predicted of it.

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here, or nothing was predicted in time.
    """
    reason = why_no_gpu() if options.names_a_card else None
    if reason is None or torch.cuda.is_available():
        try:
            return run_search(workload, options, listener)
        except NoDeviceError:
            if not options.names_a_card:
                raise
            reason = "there is no CUDA device here"
    return predicted_search(workload, options, listener or (lambda _: None), reason=reason)


def predicted_search(workload: Workload, options: SearchOptions, listener: Listener, *, reason: str) -> Result:
    """What a search for a card that is not here would probably find, in the files that a search leaves.

    Args:
        reason: why nothing can be measured.

    Raises:
        InputError: something given is wrong; UntraceableError: the model cannot be followed without its weights;
        ProbeError: it took longer than the time limit.
    """
    start = time.monotonic()
    if options.gpu:
        card_to_search_for(options.gpu)  # what cannot be searched for is told before all else
    listener(Note(no_gpu_note(reason)))
    listener(PhaseStarted("looking at the model"))
    hardware, assumed = hardware_for(options)
    if options.host_mem is None:
        assumed = (*assumed, _HOST_UNKNOWN)
    budget, named = budget_for(options, hardware), options.out is not None
    with RunDirectory(options.out or Path("autofit-runs") / new_run_name(workload.name)) as directory:
        try:
            for note in assumed:
                listener(Note(note))
            with LocalExecutor(directory.probes) as executor:
                space = _Space(executor, workload, hardware, budget, options=options, listener=listener)
                result = space.result()
        except BaseException:  # Ctrl-C too
            directory.discard_if_unused(keep_folder=named)
            raise
        notes = (no_gpu_note(reason), *assumed, *result.notes)
        result = dataclasses.replace(result, notes=notes, search_seconds=time.monotonic() - start)
        listener(PhaseStarted("writing the result and the report"))

        def notify(text: str) -> None:
            listener(Note(text))

        result = hand_over(result, space.workload, directory, notify=notify)
        return hand_over_report(unmeasured(result, options, space.timelines), directory, notify=notify)


class _Space:
    """The predicted space of a search, and what it comes to."""

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
        self._ends = time.monotonic() + (options.time_limit or _PATIENCE)
        self.timelines: dict[str, Timeline] = {}
        self.workload = workload
        if workload.traits is None:
            self.workload = dataclasses.replace(workload, traits=self._run(_traits, hardware, log="look.log"))
        space = space_for(options, self.workload, hardware)
        enumeration = Enumeration(space.knobs, techniques.constraints(self.workload, hardware))
        self._configs = enumeration.configs(options.seed)
        self._size, legal = enumeration.count(refused=True).configs, enumeration.count().configs
        self._refused = self._size - legal
        listener(
            SearchStarted(workload.name, hardware, budget, self._size, 0, options.time_limit, refused=self._refused)
        )
        self._notes = _drawn(len(self._configs), legal)
        for note in self._notes:
            listener(Note(note))
        listener(PhaseStarted(f"predicting {counted(len(self._configs), 'config')}"))
        predict = functools.partial(predict_all, processes=None)  # on as many cores as there are
        nbytes, seconds = self._run(predict, hardware, self._configs, log="estimate.log")
        self._rough = Predictions.of(self._configs, nbytes, seconds)
        rows = zip(self._configs, nbytes, seconds, strict=True)
        samples = self.workload.effective_batch_size
        self._figures = [Figures(config, samples / taken, size) for config, size, taken in rows if size > 0 < taken]

    def result(self) -> Result:
        """Everything as data, but for how long it took."""
        tiers = self._best_of_tiers()
        fits = sum(each.nbytes <= self._cap for each in self._figures)
        return Result(
            model=self.workload.name,
            workload=self.workload.summary(),
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
            predicted_best=self._best(tiers),
            predicted_tiers=tiers,
        )

    def _best_of_tiers(self) -> dict[str, Estimate | None]:
        """Of each tier the config that is predicted to be the best and to fit surely, or else one that may fit."""
        grown = {True: 1.0, False: 1.0}
        known = self._options.host_mem is not None
        candidates = {
            name: _Candidates(each, self._cap, grown, host_known=known) for name, each in self._by_tier().items()
        }
        self._listener(PhaseStarted("following a training step of the best configs"))
        found: dict[str, Estimate | None] = dict.fromkeys(TIERS)
        for _ in range(_ROUNDS):
            asked = {
                name: config
                for name, each in candidates.items()
                if not _fits_surely(found[name]) and (config := each.preferred(self._options.tolerance)) is not None
            }
            for name, answer in self._followed(asked).items():
                candidates[name].learn(asked[name], answer)
                self._take(name, answer, found)
        least = {name: config for name, each in candidates.items() if not found[name] and (config := each.least())}
        for name, answer in self._followed(least).items():
            self._take(name, answer, found)
        return found

    def _take(self, name: str, answer: _Followed | None, found: dict[str, Estimate | None]) -> None:
        """Keep what fits, and the first of those that only may."""
        if answer and answer[0].verdict != "no" and (found[name] is None or _fits_surely(answer[0])):
            found[name], self.timelines[name] = answer

    def _followed(self, asked: dict[str, Config]) -> dict[str, _Followed | None]:
        if not asked:
            return {}
        answers = self._run(_follow_all, self._hardware, self._budget, list(asked.values()), log="estimate.log")
        return dict(zip(asked, answers, strict=True))

    def _best(self, tiers: dict[str, Estimate | None]) -> Estimate | None:
        known = [each for each in tiers.values() if each]
        known = [each for each in known if _fits_surely(each)] or known
        figures = [Figures(each.config, each.samples_per_second or 0.0, each.allocated_bytes) for each in known]
        place = preferred(figures, tolerance=self._options.tolerance, fidelity=techniques.fidelity)
        return None if place is None else known[place]

    def _by_tier(self) -> dict[str, list[Figures]]:
        found: dict[str, list[Figures]] = {name: [] for name in TIERS}
        for each in self._figures:
            found[tier(each.config)].append(each)
        return found

    def _frontier(self) -> dict[str, tuple[Point, ...]]:
        length = self.workload.sequence_length if self.workload.unit == "tokens" else None
        points: dict[str, list[Point]] = {name: [] for name in TIERS}
        for config in leading(self._rough, _POINTS):
            rate = self.workload.effective_batch_size / self._rough.seconds[config]
            nbytes = int(self._rough.nbytes[config]) + self._hardware.context_bytes
            point = Point(config, nbytes, rate, rate * length if length else None, measured=False)
            points[tier(config)].append(point)
        return {name: thinned(frontier(each)) for name, each in points.items()}

    @property
    def _cap(self) -> int:
        return self._budget.cap_bytes(self._hardware.device, self._hardware.context_bytes)

    def _run(self, function: Callable[..., Any], *arguments: Any, log: str) -> Any:
        left = max(1.0, self._ends - time.monotonic())
        return self._executor.run(function, self.workload, *arguments, log=log, timeout=left)


_Followed = tuple[Estimate, Timeline]


class _Candidates:
    """The configs of a tier that may be its best.

    Args:
        grown: by how much upper ends were seen to lie above rough figures, by whether a config is compiled, of which
            less is known; tiers learn it together.
        host_known: whether the user said what memory the host has.
    """

    def __init__(self, figures: Sequence[Figures], cap: int, grown: dict[bool, float], *, host_known: bool) -> None:
        self._figures, self._cap, self._grown, self._host_known = figures, cap, grown, host_known
        self._seen: set[Config] = set()

    def preferred(self, tolerance: float) -> Config | None:
        """The one to recommend of those that may fit surely and were not followed yet.

        One that keeps part of the training on a host of which nothing is known comes after all that do without.
        """
        left = [each for each in self._figures if self._may_fit(each)]
        if not self._host_known:
            left = [each for each in left if not techniques.keeps_on_host(each.config)] or left
        place = preferred(left, tolerance=tolerance, fidelity=techniques.fidelity)
        return None if place is None else left[place].config

    def learn(self, config: Config, answer: _Followed | None) -> None:
        """What following a config has shown."""
        self._seen.add(config)
        if answer is not None:
            found = answer[0]
            rough = next(each.nbytes for each in self._figures if each.config == config)
            grown = (found.high - found.breakdown["context"]) / rough
            self._grown[_compiled(config)] = max(self._grown[_compiled(config)], grown)

    def least(self) -> Config | None:
        """The one that needs least, unless that is hopeless."""
        left = [each for each in self._figures if each.config not in self._seen]
        least = min(left, key=lambda each: each.nbytes, default=None)
        return least.config if least and least.nbytes <= _SURELY_TOO_LARGE * self._cap else None

    def _may_fit(self, each: Figures) -> bool:
        return each.nbytes * self._grown[_compiled(each.config)] <= self._cap and each.config not in self._seen


def _drawn(predicted: int, legal: int) -> tuple[str, ...]:
    """What is said where the space is too large for all of it to be predicted."""
    if predicted >= legal:
        return ()
    drawn = counted(predicted, "config")
    return (f"The space is too large to predict all of it: {drawn} of it, drawn at random, are.",)


def _compiled(config: Config) -> bool:
    return config["compile"] != "none"


def _fits_surely(found: Estimate | None) -> bool:
    return found is not None and found.verdict == "yes"


def _traits(workload: Workload, hardware: Hardware) -> Traits:
    """What a look at the model's structure tells; its loss is not tried, for want of the device."""
    return dataclasses.replace(inspect_workload(workload, hardware, budget_bytes=0), notes=())


def _follow_all(
    workload: Workload, hardware: Hardware, budget: Budget, configs: Sequence[Config]
) -> list[_Followed | None]:
    """The estimate of each config and the memory through its step; None where that cannot be followed."""

    def follow(config: Config) -> _Followed | None:
        try:
            traced = trace(workload, config, hardware)
        except AutofitError:
            return None
        return on_device(traced, workload, hardware, budget), timeline_of(traced, hardware, rates=rates_for(hardware))

    with spread(follow, None if len(configs) > 1 else 1) as follow_each:
        return follow_each(configs)
