"""Makes the record of a search: its result, the prediction for each trial, and the memory of the best configs through a
step, which a child follows on fake tensors. On request, traces a real step of the best config for profilers."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from autofit.core.errors import AutofitError
from autofit.core.estimate import Timeline
from autofit.core.options import SearchOptions
from autofit.core.record import Predicted, Record
from autofit.core.result import Result
from autofit.core.workload import Workload
from autofit.estimate import timelines
from autofit.probe import Executor
from autofit.search import Predictions

# For following one config: at most, and as a share of the time limit. A picture is not worth more.
FOLLOW_SECONDS, FOLLOW_SHARE = 60.0, 0.05


def make_record(
    result: Result, options: SearchOptions, predictions: Predictions | None, timelines: Mapping[str, Timeline]
) -> Record:
    """The record of a search that has just ended."""

    def finite(figure: float | None) -> float | None:
        return figure if figure is not None and math.isfinite(figure) else None

    predicted = []
    if predictions:
        nbytes, seconds = predictions.nbytes, predictions.seconds
        predicted = [Predicted(finite(nbytes.get(t.config)), finite(seconds.get(t.config))) for t in result.trials]
    told = options.model_dump(include={"seed", "tolerance", "trials", "time_limit", "workers", "space", "set"})
    finished = datetime.now().astimezone().isoformat(timespec="seconds")
    return Record(result=result, options=told, predicted=tuple(predicted), timelines=timelines, finished=finished)


def follow_tiers(result: Result, workload: Workload, options: SearchOptions, executor: Executor) -> dict[str, Timeline]:
    """The memory of each tier's best config through a step, as far as it can be followed in time.

    Empty for an interrupted search.
    """
    if result.stopped_by == "interrupt":
        return {}
    timeout = min(FOLLOW_SECONDS, max(1.0, FOLLOW_SHARE * (options.time_limit or math.inf)))
    run = functools.partial(executor.run, timelines, workload, result.hardware, log="timeline.log", timeout=timeout)
    followed: dict[str, Timeline] = {}
    # Too slow, or not wanted: the report does without the other tiers.
    with contextlib.suppress(AutofitError, KeyboardInterrupt):
        for name, best in result.tiers.items():
            if best is not None and (timeline := run([best.config])[0]) is not None:
                followed[name] = timeline
    return followed


def trace_best(
    result: Result, workload: Workload, executor: Executor, *, directory: Path, notify: Callable[[str], None]
) -> Result:
    """Trace one step of the best config, and add the files of the trace to the result.

    A failed trace is only noted. Ctrl-C ends the search here as anywhere else, with the answer found so far.
    """
    if result.best is None or result.stopped_by == "interrupt":
        return result
    try:
        files = executor.trace(workload, result.best.config, result.hardware, result.budget, directory=directory)
    except AutofitError as error:
        notify(f"no step of the best config could be recorded: {error.message}")
        return result
    except KeyboardInterrupt:
        return dataclasses.replace(result, stopped_by="interrupt")
    if result.hardware.device == "cpu":
        notify("memory snapshots need CUDA: on a CPU there is only the trace, which holds the allocations too.")
    return dataclasses.replace(result, files={**result.files, **files})
