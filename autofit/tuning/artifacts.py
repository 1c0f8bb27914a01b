"""The files that a search leaves: result.yaml, train.py, exports, result.json and report.html."""

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime

from autofit.core.errors import InputError
from autofit.core.estimate import Timeline
from autofit.core.events import Notify
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB
from autofit.core.options import SearchOptions
from autofit.core.record import Predicted, Record
from autofit.core.result import Result
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.estimate.space_stages import StagePlans
from autofit.export.from_result import LayerNames, export_all
from autofit.export.script import train_script
from autofit.models import HuggingFaceModel
from autofit.report.html import report_page
from autofit.report.knob_effects import single_changes
from autofit.search.predictions import Predictions

# of the options, in the record
_KEPT = {"seed", "tolerance", "prefer", "trials", "time_limit", "workers", "space", "set"}


def make_record(
    result: Result,
    options: SearchOptions,
    predictions: Predictions | None,
    timelines: Mapping[str, Timeline],
) -> Record:
    """The record of a search that has just ended: its result, and the prediction for each trial."""

    def finite(figure: float | None) -> float | None:
        if figure is None or not math.isfinite(figure):
            return None
        return figure

    predicted = []
    if predictions:
        for trial in result.trials:
            nbytes = predictions.nbytes.get(trial.config)
            seconds = predictions.seconds.get(trial.config)
            predicted.append(Predicted(finite(nbytes), finite(seconds)))

    asked = options.model_dump(include=_KEPT)
    finished = datetime.now().astimezone().isoformat(timespec="seconds")
    return Record(result, asked, tuple(predicted), timelines, finished)


def write_run(
    record: Record,
    workload: Workload,
    directory: RunDirectory,
    *,
    notify: Notify,
    layers: LayerNames | None = None,
) -> Result:
    """Write the files of a search into its run directory.

    Returns:
        The result, which names the files.
    """
    files: dict[str, str | None] = dict.fromkeys(("result", "script", "exports", "report"))
    files.update(record.result.files)
    result = dataclasses.replace(record.result, run_directory=str(directory.path))

    if result.config is not None:
        write_atomically(directory.result, result.to_yaml())
        files["result"] = str(directory.result)

        script = _train_script(result, workload, notify)
        if script is not None:
            write_atomically(directory.script, script)
            files["script"] = str(directory.script)

        export_all(result, workload.model, directory.exports, notify=notify, layers=layers)
        files["exports"] = str(directory.exports)

    without_report = dataclasses.replace(result, files=files)
    result = dataclasses.replace(result, files={**files, "report": str(directory.report)})
    complete = dataclasses.replace(record, result=result)
    write_atomically(directory.record, complete.to_text())
    try:
        write_atomically(directory.report, report_page(complete, directory.path))
    except Exception as error:  # hours of measurements are not lost for a picture
        what = f"{type(error).__name__}: {error}"
        notify(f"the report could not be drawn ({what}); `autofit report` tries again.")
        return without_report
    return result


def _train_script(result: Result, workload: Workload, notify: Notify) -> str | None:
    """The text of train.py; None for a model that is not of transformers, or a config that no
    script can run."""
    if not isinstance(workload.model, HuggingFaceModel):
        return None
    assert result.config is not None
    budget_gib = round(result.budget.device_bytes / GIB, 3)
    plan = StagePlans(workload, result.hardware).of(result.config)
    try:
        return train_script(
            model=result.model,
            workload=result.workload,
            source=result.source,
            model_config={**workload.model.config, **workload.model.options},
            config=result.config,
            measured=result.best.to_measured() if result.best else None,
            predicted=result.predicted_best.to_predicted() if result.predicted_best else None,
            versions=result.versions,
            changes=single_changes(result),
            cuts=plan.cuts if plan else (),
            hardware={**result.hardware.to_dict(), "budget_gib": budget_gib},
        )
    except InputError as error:
        notify(str(error))
        return None
