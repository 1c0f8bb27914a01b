"""Annotations of an answer: memory through a step, other numbers of devices, what would help, names
of layers.

A child process finds each of them by following steps on fake tensors. None is worth losing an
answer for: what fails, takes too long or is interrupted is left out.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, InputError
from autofit.core.estimate import Remedy, Timeline
from autofit.core.events import Listener, Note
from autofit.core.hardware import Hardware
from autofit.core.layout import fitted_to
from autofit.core.measurement import Outcome
from autofit.core.options import SearchOptions
from autofit.core.result import OnDevices, Result, tier
from autofit.core.workload import Workload
from autofit.estimate.processes import parallel_map
from autofit.estimate.timeline import timelines
from autofit.estimate.trace import trace
from autofit.export.from_result import LayerNames, layer_names
from autofit.models import HuggingFaceModel
from autofit.probe import Executor
from autofit.report.formatting import bound_by
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on

FOLLOW_SECONDS = 60.0  # for following a config, at most
FOLLOW_SHARE = 0.05  # of the time limit, for all of them


@dataclass(frozen=True)
class Annotated:
    """A result with its annotations.

    Attributes:
        timelines: by tier the memory of its best config through a step.
        layers: what exports say of the layers that have adapters; None where nothing needs saying.
    """

    result: Result
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    layers: LayerNames | None = None


@dataclass(frozen=True)
class Annotator:
    """Asks child processes of an executor for what annotates a result."""

    workload: Workload
    options: SearchOptions
    executor: Executor

    def timelines(self, result: Result) -> dict[str, Timeline]:
        """By tier the memory of its best config through a step.

        A tier is left out where its config cannot be followed in time.
        """
        best = {name: measured.config for name, measured in result.tiers.items() if measured}
        if not best:
            return {}

        found = self._ask(
            timelines,
            result.hardware,
            list(best.values()),
            log="timeline.log",
            seconds=self._in_time(FOLLOW_SECONDS * len(best)),
        )
        lines = zip(best, found or (), strict=False)
        return {name: line for name, line in lines if line is not None}

    def on_devices(self, result: Result) -> tuple[OnDevices, ...]:
        """The config of the answer on 1, 2, 4 ... devices, where the search was for several."""
        if result.config is None or result.hardware.world == 1:
            return ()

        found: tuple[OnDevices, ...] | None = self._ask(
            _on_devices,
            result.hardware,
            result.budget,
            result.config,
            log="devices.log",
            seconds=self._in_time(FOLLOW_SECONDS),
        )
        return found or ()

    def remedies(self, result: Result, near: Config | None) -> tuple[Remedy, ...]:
        """What would help where nothing fits, around a config that nearly does."""
        if result.config is not None or near is None:
            return ()
        outcomes = {trial.outcome for trial in result.trials}
        if Outcome.DIVERGED in outcomes and Outcome.OUT_OF_MEMORY not in outcomes:
            return ()  # which memory does not mend

        found: tuple[Remedy, ...] | None = self._ask(
            what_helps,
            result.hardware,
            result.budget,
            near,
            log="remedies.log",
            seconds=self._in_time(FOLLOW_SECONDS),
        )
        return found or ()

    def layers(self, result: Result) -> LayerNames | None:
        """What exports say of the layers that have adapters."""
        adapted = result.config is not None and result.config.lora_rank
        if not adapted or not isinstance(self.workload.model, HuggingFaceModel):
            return None

        found: LayerNames | None = self._ask(
            _layer_names, result.config, log="layers.log", seconds=FOLLOW_SECONDS
        )
        return found

    def _in_time(self, seconds: float) -> float:
        """So many seconds, but no more than a share of the time limit."""
        limit = self.options.time_limit or math.inf
        return min(seconds, max(1.0, FOLLOW_SHARE * limit))

    def _ask(self, function: Callable[..., Any], *arguments: Any, log: str, seconds: float) -> Any:
        """What a child finds of the workload; None where it does not, or not in time."""
        try:
            return self.executor.run(function, self.workload, *arguments, log=log, timeout=seconds)
        except (AutofitError, KeyboardInterrupt):
            return None


def with_trace(
    result: Result, workload: Workload, executor: Executor, *, directory: Path, listener: Listener
) -> Result:
    """The result with the files of a traced step of its best config; a failed trace is only noted.

    Ctrl-C ends the search here as anywhere else, with the answer found so far.
    """
    assert result.best is not None
    try:
        files = executor.trace(
            workload, result.best.config, result.hardware, result.budget, directory=directory
        )
    except AutofitError as error:
        listener(Note(f"no step of the best config could be recorded: {error.message}"))
        return result
    except KeyboardInterrupt:
        return dataclasses.replace(result, stopped_by="interrupt")

    if result.hardware.device == "cpu":
        text = (
            "memory snapshots need CUDA: on a CPU there is only the trace, which holds the "
            "allocations too."
        )
        listener(Note(text))
    return dataclasses.replace(result, files={**result.files, **files})


def bottleneck_note(result: Result, lines: Mapping[str, Timeline]) -> str | None:
    """A sentence on what bounds the speed of the best config, where it was followed."""
    line = lines.get(tier(result.best.config)) if result.best else None
    if line is None or line.bottleneck is None:
        return None

    return f"By what is predicted, the best config is {bound_by(line.bottleneck, line.config)}."


def _on_devices(
    workload: Workload, hardware: Hardware, budget: Budget, config: Config
) -> tuple[OnDevices, ...]:
    """What is predicted of the config on several numbers of devices, without those that do not
    divide the batch."""

    def on(devices: int) -> OnDevices | None:
        fewer = hardware.of_several(devices, hardware.nodes, hardware.link)
        knobs = fitted_to(config, fewer.world, workload.effective_batch_size)
        with contextlib.suppress(InputError):
            traced = trace(workload, knobs, fewer)
            estimate = estimate_on(traced, workload, fewer, budget)
            rate = estimate.tokens_per_second or estimate.samples_per_second
            return OnDevices(devices, estimate.high, rate)
        return None

    counts = sorted({1, 2, 4, 8, hardware.devices, 2 * hardware.devices})
    # On a CPU rates are measured first, which threads do that no fork survives.
    processes = None if hardware.device == "cuda" else 1
    with parallel_map(on, processes) as on_each:
        return tuple(found for found in on_each(counts) if found)


def _layer_names(workload: Workload, config: Config) -> LayerNames:
    return layer_names(workload.model, config, workload.task)
