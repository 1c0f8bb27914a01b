"""Makes the record of a search: its result, what was predicted of what was measured, and how the memory of the best
configs runs through a step, which a child follows on tensors without storage. Where it is asked for, one real step of
the best is kept for the viewers that people have."""

from __future__ import annotations

import dataclasses
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
from autofit.probe import LocalExecutor
from autofit.search import Predictions

# For following one config, at most and of a time limit: a picture is not worth more.
FOLLOW_SECONDS, FOLLOW_SHARE = 60.0, 0.05
_OPTIONS = ("seed", "tolerance", "trials", "time_limit", "workers", "space", "set")


def recorded(
    result: Result, options: SearchOptions, *, workload: Workload, expected: Predictions | None, executor: LocalExecutor
) -> Record:
    """The record of a search that has just ended; without timelines where it was interrupted."""
    return Record(
        result=result,
        options=options.model_dump(include=set(_OPTIONS)),
        predicted=_predicted(result, expected),
        timelines=_timelines(result, workload, options, executor),
        finished=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def unmeasured(result: Result, options: SearchOptions, timelines: Mapping[str, Timeline]) -> Record:
    """The record of a search of which all was predicted."""
    return Record(
        result=result,
        options=options.model_dump(include=set(_OPTIONS)),
        timelines=timelines,
        finished=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def traced(
    result: Result, workload: Workload, executor: LocalExecutor, *, directory: Path, notify: Callable[[str], None]
) -> Result:
    """The result with a record of one step of its best config in its files; without, where that cannot be had.

    Ctrl-C ends the search here as anywhere else, with the answer that was found.
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
        notify("memory snapshots are CUDA's: of a CPU there is the trace alone, which holds its allocations, too.")
    return dataclasses.replace(result, files={**result.files, **files})


def _predicted(result: Result, expected: Predictions | None) -> tuple[Predicted, ...]:
    if expected is None:
        return ()
    return tuple(
        Predicted(_finite(expected.nbytes.get(each.config)), _finite(expected.seconds.get(each.config)))
        for each in result.trials
    )


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None


def _timelines(
    result: Result, workload: Workload, options: SearchOptions, executor: LocalExecutor
) -> dict[str, Timeline]:
    """By tier of its best config; nothing where the user wants out, or where nothing could be followed before."""
    if result.stopped_by == "interrupt":
        return {}
    timeout = min(FOLLOW_SECONDS, max(1.0, FOLLOW_SHARE * (options.time_limit or math.inf)))
    followed: dict[str, Timeline] = {}
    try:
        for name, best in result.tiers.items():
            if best is not None:
                found = executor.run(
                    timelines, workload, result.hardware, [best.config], log="timeline.log", timeout=timeout
                )
                if found[0] is not None:
                    followed[name] = found[0]
    except (AutofitError, KeyboardInterrupt):  # too slow, or not wanted: the report goes without the rest
        return followed
    return followed
