"""One search from start to end: explore, verify, judge, annotate, write.

Measured and predicted searches differ in how they explore and verify. The rest is the same for
both.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Protocol

import torch

from autofit.core.before_training import pass_note
from autofit.core.beginning import began
from autofit.core.capacity import capacity_note
from autofit.core.config import Config
from autofit.core.errors import NoDeviceError
from autofit.core.estimate import Timeline
from autofit.core.events import Listener, Note, PhaseStarted
from autofit.core.options import SearchOptions
from autofit.core.result import Result
from autofit.core.run_directory import RunDirectory, free_run_directory
from autofit.core.workload import Workload
from autofit.hardware.driver import why_no_gpu
from autofit.probe import Executor
from autofit.search.predictions import Predictions
from autofit.tuning.annotations import Annotated, Annotator, bottleneck_note, with_trace
from autofit.tuning.artifacts import make_record, write_run
from autofit.tuning.context import Judging
from autofit.tuning.measured import measured_search
from autofit.tuning.predicted import predicted_search

_MOST_OF_NAME = 100  # characters of a model's name in that of its run directory


class Search(Protocol):
    """How an answer is found: by measurements, or by predictions alone.

    Attributes:
        workload: with its traits.
        executor: runs functions of the workload in child processes.
        predictions: of every trial; None where nothing was predicted, or nothing measured.
        follows: whether there is time to follow steps for the report.
    """

    workload: Workload
    executor: Executor
    predictions: Predictions | None
    follows: bool

    def explore(self) -> None:
        """Find the configs that may be the answer."""

    def verify(self) -> None:
        """Make sure of those that promise most."""

    def answer(self) -> Result:
        """What was found, without annotations."""

    def near(self, result: Result) -> Config | None:
        """A config that nearly fits, where none does."""

    def timelines(self, result: Result, annotator: Annotator) -> Mapping[str, Timeline]:
        """By tier the memory of its best config through a step."""

    def learn(self) -> None:
        """Improve later predictions by what was measured."""


OpenSearch = Callable[
    [Workload, SearchOptions, RunDirectory, Listener, float], AbstractContextManager[Search]
]


def search_or_predict(
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None = None,
    *,
    judge: Judging | None = None,
) -> Result:
    """Search; for a card where no CUDA device is here, predict what the search would find.

    Raises:
        InputError: an option is wrong; ProbeError: probes cannot run here, or the prediction took
        too long.
    """
    reason = why_no_gpu() if options.names_a_card else None
    if reason is None or torch.cuda.is_available():
        try:
            return run_search(workload, options, listener, judge=judge)
        except NoDeviceError:
            if not options.names_a_card:
                raise
            reason = "there is no CUDA device here"
    return predict_search(workload, options, listener, reason=reason)


def run_search(
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None = None,
    *,
    judge: Judging | None = None,
) -> Result:
    """Search for the fastest config that fits the budget, verify it, and write the run directory.

    `best` is None when nothing fits. Ctrl-C ends the search early, with what it has: `stopped_by`
    is "interrupt".

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here.
    """
    return _run(measured_search, workload, options, listener, judge=judge)


def predict_search(
    workload: Workload, options: SearchOptions, listener: Listener | None = None, *, reason: str
) -> Result:
    """Predict what a search would find, and write the files of a search.

    Args:
        reason: why nothing can be measured.

    Raises:
        InputError: an option is wrong; UntraceableError: the model cannot be followed without its
        weights; ProbeError: the prediction took longer than the time limit.
    """
    # Predictions cannot continue a search that measured.
    without_resuming = options.model_copy(update={"resume": False})
    return _run(
        functools.partial(predicted_search, reason=reason), workload, without_resuming, listener
    )


def _run(
    open_search: OpenSearch,
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None,
    *,
    judge: Judging | None = None,
) -> Result:
    start = began()
    listener = listener or (lambda event: None)
    with _run_directory(workload, options) as directory:
        directory.notify = lambda text: listener(Note(text))

        with open_search(workload, options, directory, listener, start) as search:
            search.explore()
            search.verify()
            result = search.answer()

            if judge and result.best and not result.was_interrupted:
                result = _judged(judge, result, search.executor, listener)

            annotated = _annotated(result, search, options, directory, listener)

        search.learn()

        directory.restored()
        listener(PhaseStarted("writing the result and the report"))
        record = make_record(annotated.result, options, search.predictions, annotated.timelines)
        return write_run(
            record, search.workload, directory, notify=directory.notify, layers=annotated.layers
        )


def _judged(judge: Judging, result: Result, executor: Executor, listener: Listener) -> Result:
    """The result with what its finalists learn. That has seconds of its own."""
    until = executor.until
    executor.end_by(math.inf)
    before = time.monotonic()

    result = judge(result, executor, listener)

    executor.end_by(until + time.monotonic() - before)
    return result


def _annotated(
    result: Result,
    search: Search,
    options: SearchOptions,
    directory: RunDirectory,
    listener: Listener,
) -> Annotated:
    """The result with its annotations.

    After Ctrl-C there are only those that files need.
    """
    annotator = Annotator(search.workload, options, search.executor)

    if options.memory_snapshot and result.best and not result.was_interrupted:
        listener(PhaseStarted("tracing one training step of the best config"))
        result = with_trace(
            result, search.workload, search.executor, directory=directory.path, listener=listener
        )

    for tiers in (result.tiers, result.predicted_tiers):
        adapted = tiers.get("lora") or tiers.get("qlora")
        if adapted:
            result = _with_note(result, capacity_note(search.workload, adapted.config))

    if result.config is not None:
        result = _with_note(result, pass_note(result.config))

    timelines: Mapping[str, Timeline] = {}
    if search.follows and not result.was_interrupted:
        timelines = search.timelines(result, annotator)
        trained = {}
        for name, timeline in timelines.items():
            if timeline.resting:
                trained[name] = timeline.resting.trained
        on_devices = annotator.on_devices(result)
        result = dataclasses.replace(result, on_devices=on_devices, trained=trained)
        result = _with_note(result, bottleneck_note(result, timelines))

    if not result.was_interrupted:
        remedies = annotator.remedies(result, search.near(result))
        result = dataclasses.replace(result, remedies=remedies)

    return Annotated(result, timelines, annotator.layers(result))


def _with_note(result: Result, note: str | None) -> Result:
    """The result with one more note, where there is one."""
    if note is None:
        return result
    return dataclasses.replace(result, notes=(*result.notes, note))


def _run_directory(
    workload: Workload, options: SearchOptions
) -> AbstractContextManager[RunDirectory]:
    """Enters the run directory: the one that the user gave, or a free one named by model and
    time."""
    if options.out:
        return RunDirectory(options.out, resume=options.resume)

    name = re.sub(r"[^A-Za-z0-9.-]+", "-", workload.name).strip("-")[:_MOST_OF_NAME]
    return free_run_directory(Path("autofit-runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
