"""Writes the files of a run directory: result.yaml, train.py, exports, result.json and report.html."""

import dataclasses
from collections.abc import Callable

from autofit.core.errors import InputError
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import Workload
from autofit.export import train_script
from autofit.export.from_result import export_all
from autofit.models import HuggingFaceModel
from autofit.report.html import report_page
from autofit.report.knob_effects import single_changes


def write_artifacts(
    result: Result, workload: Workload, directory: RunDirectory, *, notify: Callable[[str], None]
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
    export_all(result, workload.model, directory.exports, notify=notify)
    files["exports"] = str(directory.exports)
    return dataclasses.replace(result, files=files)


def write_report(record: Record, directory: RunDirectory, *, notify: Callable[[str], None]) -> Result:
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
