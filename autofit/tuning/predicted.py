"""A search for a card that is not here: predicts the space and gives an answer as any search does.

All of it runs in child processes, as probes do.
"""

import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import ProbeError, pluralize
from autofit.core.estimate import Estimate, Timeline
from autofit.core.events import (
    Listener,
    Note,
    PhaseProgressed,
    PhaseStarted,
    SearchStarted,
)
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import Point, frontier, thinned
from autofit.core.result import TIERS, Result, of_tier, tier, tiers_of
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.hardware.budgets import budget_for, other_budgets
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note
from autofit.probe import Executor, LocalExecutor
from autofit.report.formatting import close_call_note, packing_note
from autofit.search.enumeration import Enumeration
from autofit.search.predictions import Predictions
from autofit.search.ranking import Figures
from autofit.tuning.annotations import Annotator
from autofit.tuning.context import about_search, ranking_for
from autofit.tuning.narrowing import MICRO_BATCH, BytesAndSeconds, Narrowing
from autofit.tuning.predicted_space import Answer, Question, search_space
from autofit.tuning.space import space_for
from autofit.tuning.target import structure_traits, target_hardware

_NO_LIMIT = 86_400.0  # seconds, where the user sets no time limit
CUT_SHORT = "A longer --time-limit looks further."  # the end of a note that says so
_ANSWER_SHARE = 0.9  # of the time limit, when the answer is there; the rest is for writing it
_HOST_UNKNOWN = (
    "The host of that card is unknown: it is taken to have {:.0f} GiB, and configs that need none "
    "of it are preferred; --host-mem says what it has."
)
_LOOK_SECONDS = 1.0  # between two looks at the progress of a child


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
    progress = directory.probes / "progress.json"
    with LocalExecutor(directory.probes) as executor:
        yield PredictedSearch(
            executor, workload, hardware, budget, options, listener, start, progress, notes
        )


class PredictedSearch:
    """Has a child process find the best predicted config of each tier. Give it to
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
        progress: Path,
        notes: tuple[str, ...],
    ) -> None:
        self.executor = executor
        self.workload = workload
        self._hardware = hardware
        self._budget = budget
        self._options = options
        self._listener = listener
        self._start = start
        self._progress = progress
        self._notes = notes
        self._cap = budget.cap_bytes(hardware.device, hardware.context_bytes)
        self._ranking = ranking_for(options)
        self._deadline = start + (options.time_limit or _NO_LIMIT)

    def explore(self) -> None:
        """Predict the configs around the best of each tier."""
        options = self._options
        hardware = self._hardware
        if self.workload.traits is None:
            traits = self._run(structure_traits, hardware, log="look.log")
            self.workload = dataclasses.replace(self.workload, traits=traits)

        space = space_for(options, self.workload, hardware)
        if MICRO_BATCH not in options.set:
            narrowing = Narrowing(self.workload, hardware, self._cap, self._predicted, options.seed)
            space = narrowing.with_whole_batches(space)
        enumeration = Enumeration(space.knobs, techniques.constraints(self.workload, hardware))
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
        self._listener(PhaseStarted(f"predicting the best of {pluralize(legal, 'config')}"))

        other_caps = []
        for other in other_budgets(self._budget, hardware):
            budget = dataclasses.replace(self._budget, device_bytes=other.device_bytes)
            other_caps.append(budget.cap_bytes(hardware.device, hardware.context_bytes))

        with progress_told(self._progress, self._listener) as progress:
            question = Question(
                space.knobs,
                hardware,
                self._budget,
                self._ranking,
                host_known=options.host_mem is not None,
                other_caps=tuple(other_caps),
                progress=progress,
                until=self._start + _ANSWER_SHARE * (options.time_limit or math.inf),
            )
            self._answer: Answer = self._run(search_space, question, log="estimate.log")

        predicted = len(self._answer.rows)
        if self._answer.cut_short:
            self._note(
                f"{pluralize(predicted, 'config')} were predicted in the time that there was: "
                f"others may be faster, or fit where none of them does. {CUT_SHORT}"
            )
        elif predicted < legal:
            self._note(
                f"{pluralize(predicted, 'config')} were predicted, around the best of each tier: "
                "no change of one or two knobs is expected to be faster than the fastest of them."
            )

    def _note(self, text: str) -> None:
        self._notes = (*self._notes, text)
        self._listener(Note(text))

    def _predicted(self, configs: Sequence[Config]) -> BytesAndSeconds:
        """Bytes and seconds of each config, predicted on as many cores as there are."""
        predict = functools.partial(predict_all, host_bytes=self._budget.host_bytes, processes=None)
        found: BytesAndSeconds = self._run(predict, self._hardware, configs, log="estimate.log")
        return found

    def verify(self) -> None:
        """The best of each tier was followed already: that tells what else may fit."""

    def answer(self) -> Result:
        """What was predicted, without annotations."""
        tiers: dict[str, Estimate | None] = dict.fromkeys(TIERS)
        for name, (estimate, _) in self._answer.followed.items():
            tiers[name] = estimate

        best = self._best([estimate for estimate in tiers.values() if estimate])
        notes: list[str | None] = [*self._notes]
        if best:
            close = self._answer.close.get(tier(best.config), 0)
            notes.append(close_call_note(close, self._options.tolerance))
        notes.append(packing_note(self.workload.description(), best))

        too_large = sum(row.nbytes > self._cap for row in self._answer.rows)
        return Result(
            best=None,
            tiers={},
            trials=(),
            skipped={"predicted": too_large, "refused": self._refused},
            stopped_by="prediction",
            space_size=self._size,
            notes=tuple(filter(None, notes)),
            frontier=self._frontier(),
            other_budgets=other_budgets(self._budget, self._hardware),
            predicted=True,
            predicted_best=best,
            predicted_tiers=tiers,
            **about_search(self.workload, self._hardware, self._budget, self._start),
        )

    def near(self, result: Result) -> Config | None:
        """The config that is predicted to need least memory."""
        known = (row for row in self._answer.rows if row.nbytes > 0)
        least = min(known, key=attrgetter("nbytes"), default=None)
        return least.config if least else None

    def timelines(self, result: Result, annotator: Annotator) -> Mapping[str, Timeline]:
        """By tier the memory of its best config through a step, which was followed already."""
        return {name: line for name, (_, line) in self._answer.followed.items()}

    def learn(self) -> None:
        """Nothing was measured that could be learnt from."""

    def _best(self, estimates: Sequence[Estimate]) -> Estimate | None:
        """The one to recommend of the best of all tiers, of those that surely fit if any does."""
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
        for row in self._answer.rows:
            if not (row.nbytes > 0 and row.seconds > 0):
                continue
            rate = self.workload.effective_batch_size / row.seconds
            nbytes = int(row.nbytes) + self._hardware.context_bytes
            tokens = rate * length if length else None
            points.append(Point(row.config, nbytes, rate, tokens, measured=False))

        found = {}
        for name in tiers_of(points):
            found[name] = thinned(frontier(of_tier(name, points)))
        return found

    def _run(self, function: Callable[..., Any], *arguments: Any, log: str) -> Any:
        """Call a function of the workload in a child process, within the time limit."""
        left = max(1.0, self._deadline - time.monotonic())
        try:
            return self.executor.run(function, self.workload, *arguments, log=log, timeout=left)
        except ProbeError as error:
            if time.monotonic() < self._deadline:
                raise
            message = f"the time limit of {self._options.time_limit:g} s was over before an answer."
            raise ProbeError(message, "Give a longer --time-limit.") from error


@contextlib.contextmanager
def progress_told(path: Path, listener: Listener) -> Iterator[Path]:
    """Gives the listener, once a second, what a child process writes to the file of how far it has
    come; the file is gone at the end."""
    ended = threading.Event()

    def relay() -> None:
        told = None
        while not ended.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):  # nothing was written yet
                text = path.read_text(encoding="utf-8")
                if text != told:
                    told = text
                    listener(PhaseProgressed(**json.loads(text)))

    with ThreadPoolExecutor(1) as threads:
        relayed = threads.submit(relay)
        try:
            yield path
        finally:
            ended.set()
            path.unlink(missing_ok=True)
        relayed.result()  # raises what the listener raised
