"""What a search leaves: its record, the files of a run directory, and on request the trace of a step for profilers.

The record is its result, the prediction for each trial, and the memory of the best configs through a step, which a
child follows on fake tensors. The files are result.yaml, train.py, exports, result.json and report.html.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, InputError
from autofit.core.estimate import Timeline
from autofit.core.events import Notify
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB, Hardware
from autofit.core.layout import fitted_to
from autofit.core.options import SearchOptions
from autofit.core.record import Predicted, Record
from autofit.core.result import OnDevices, Result, tier
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate.timeline import timelines
from autofit.estimate.trace import trace
from autofit.export.from_result import LayerNames, export_all, layer_names
from autofit.export.script import train_script
from autofit.models import HuggingFaceModel
from autofit.probe import Executor
from autofit.report.formatting import bound_by
from autofit.report.html import report_page
from autofit.report.knob_effects import single_changes
from autofit.search.predictions import Predictions
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on

# For following configs: at most for each, and for all as a share of the time limit. A picture is not worth more.
FOLLOW_SECONDS, FOLLOW_SHARE = 60.0, 0.05


def make_record(
    result: Result,
    options: SearchOptions,
    predictions: Predictions | None,
    timelines: Mapping[str, Timeline],
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
    return Record(result, told, tuple(predicted), timelines, finished)


def follow_tiers(result: Result, workload: Workload, options: SearchOptions, executor: Executor) -> dict[str, Timeline]:
    """The memory of each tier's best config through a step, as far as it can be followed in time. Empty for an
    interrupted search."""
    bests = {name: best.config for name, best in result.tiers.items() if best is not None}
    if result.stopped_by == "interrupt" or not bests:
        return {}
    timeout = min(FOLLOW_SECONDS * len(bests), max(1.0, FOLLOW_SHARE * (options.time_limit or math.inf)))
    asked = workload, result.hardware, list(bests.values())
    found: list[Timeline | None] = []
    with contextlib.suppress(AutofitError, KeyboardInterrupt):  # too slow, or not wanted: the report does without
        found = executor.run(timelines, *asked, log="timeline.log", timeout=timeout)
    return {name: line for name, line in zip(bests, found, strict=False) if line is not None}


def with_remedies(
    result: Result, config: Config | None, workload: Workload, options: SearchOptions, executor: Executor
) -> Result:
    """The result with what would help where nothing fits: around a config that comes near, as far as that is predicted
    in time."""
    if result.config is not None or config is None or result.stopped_by == "interrupt":
        return result
    timeout = min(FOLLOW_SECONDS, max(1.0, FOLLOW_SHARE * (options.time_limit or math.inf)))
    asked = workload, result.hardware, result.budget, config
    with contextlib.suppress(AutofitError, KeyboardInterrupt):
        remedies = executor.run(what_helps, *asked, log="remedies.log", timeout=timeout)
        result = dataclasses.replace(result, remedies=tuple(remedies or ()))
    return result


def with_bottleneck(result: Result, timelines: Mapping[str, Timeline]) -> Result:
    """The result with a note on what bounds the speed of its best config, where that was followed."""
    line = timelines.get(tier(result.best.config)) if result.best else None
    if line is None or line.bottleneck is None:
        return result
    note = f"By what is predicted, the best config is {bound_by(line.bottleneck, line.config)}."
    return dataclasses.replace(result, notes=(*result.notes, note))


def follow_devices(result: Result, workload: Workload, options: SearchOptions, executor: Executor) -> Result:
    """The result with its config on 1, 2, 4 ... devices, after a search over several that was not interrupted."""
    found: tuple[OnDevices, ...] = ()
    if result.config is not None and result.hardware.world > 1 and result.stopped_by != "interrupt":
        timeout = min(FOLLOW_SECONDS, max(1.0, FOLLOW_SHARE * (options.time_limit or math.inf)))
        best = result.hardware, result.budget, result.config
        with contextlib.suppress(AutofitError, KeyboardInterrupt):
            found = executor.run(_on_devices, workload, *best, log="devices.log", timeout=timeout)
    return dataclasses.replace(result, on_devices=found)


def _on_devices(workload: Workload, hardware: Hardware, budget: Budget, config: Config) -> tuple[OnDevices, ...]:
    found = []
    for devices in sorted({1, 2, 4, 8, hardware.devices, 2 * hardware.devices}):
        fewer = hardware.of_several(devices, hardware.nodes, hardware.link)
        knobs = fitted_to(config, fewer.world, workload.effective_batch_size)
        with contextlib.suppress(InputError):  # the batch divides among other numbers
            estimate = estimate_on(trace(workload, knobs, fewer), workload, fewer, budget)
            rate = estimate.tokens_per_second or estimate.samples_per_second
            found.append(OnDevices(devices, estimate.high, rate))
    return tuple(found)


def trace_best(result: Result, workload: Workload, executor: Executor, *, directory: Path, notify: Notify) -> Result:
    """Trace one step of the best config, and add the files of the trace to the result. A failed trace is only noted.
    Ctrl-C ends the search here as anywhere else, with the answer found so far."""
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


def layers_for_exports(result: Result, workload: Workload, executor: Executor) -> LayerNames | None:
    """What exports say of the layers that have adapters, found by a child, which has imported the model's code before;
    None where it was not."""
    if result.config is None or not result.config.lora_rank or not isinstance(workload.model, HuggingFaceModel):
        return None
    with contextlib.suppress(AutofitError, KeyboardInterrupt):
        asked = workload, result.config
        found: LayerNames = executor.run(_layer_names, *asked, log="layers.log", timeout=FOLLOW_SECONDS)
        return found
    return None


def _layer_names(workload: Workload, config: Config) -> LayerNames:
    return layer_names(workload.model, config, workload.task)


def write_artifacts(
    result: Result,
    workload: Workload,
    directory: RunDirectory,
    *,
    notify: Notify,
    layers: LayerNames | None = None,
) -> Result:
    """Write result.yaml, the exports and, for a model of transformers, train.py; the result names the files."""
    files: dict[str, str | None] = {"result": None, "script": None, "exports": None, "report": None, **result.files}
    result = dataclasses.replace(result, run_directory=str(directory.path))
    if result.config is None:
        return dataclasses.replace(result, files=files)
    write_atomically(directory.result, result.to_yaml())
    files["result"] = str(directory.result)
    if isinstance(workload.model, HuggingFaceModel):
        try:
            script = train_script(
                model=result.model,
                workload=result.workload,
                source=result.source,
                model_config=workload.model.config,
                config=result.config,
                measured=result.best.to_measured() if result.best else None,
                predicted=result.predicted_best.to_predicted() if result.predicted_best else None,
                versions=result.versions,
                changes=single_changes(result),
                hardware={**result.hardware.to_dict(), "budget_gib": round(result.budget.device_bytes / GIB, 3)},
            )
        except InputError as error:
            notify(str(error))
            script = None
        if script:
            write_atomically(directory.script, script)
            files["script"] = str(directory.script)
    export_all(result, workload.model, directory.exports, notify=notify, layers=layers)
    files["exports"] = str(directory.exports)
    return dataclasses.replace(result, files=files)


def write_report(record: Record, directory: RunDirectory, *, notify: Notify) -> Result:
    """Write result.json and report.html; the result names them."""
    files = {**record.result.files, "report": str(directory.report)}
    complete = dataclasses.replace(record, result=dataclasses.replace(record.result, files=files))
    write_atomically(directory.record, complete.to_text())
    try:
        write_atomically(directory.report, report_page(complete, directory.path))
    except Exception as error:  # hours of measurements are not lost for a picture
        notify(f"the report could not be drawn ({type(error).__name__}: {error}); `autofit report` tries again.")
        return record.result
    return complete.result
