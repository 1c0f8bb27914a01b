"""What a search leaves in its run directory for who goes on with it: result, script, exports, report."""

from __future__ import annotations

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
from autofit.report import single_changes
from autofit.report.html import report_page


def hand_over(result: Result, workload: Workload, directory: RunDirectory, *, notify: Callable[[str], None]) -> Result:
    """Write result.yaml, exports and, of a model of transformers, train.py; the result says where they are."""
    files: dict[str, str | None] = {"result": None, "script": None, "exports": None, "report": None, **result.files}
    result = dataclasses.replace(result, run_directory=str(directory.path))
    if result.config is None:
        return dataclasses.replace(result, files=files)
    write_atomically(directory.result, result.to_yaml())
    files["result"] = str(directory.result)
    model = workload.model
    if isinstance(model, HuggingFaceModel):
        try:
            script = train_script(
                model=result.model,
                workload=result.workload,
                source=result.source,
                model_config=model.config,
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
    export_all(result, model, directory.exports, notify=notify)
    files["exports"] = str(directory.exports)
    return dataclasses.replace(result, files=files)


def hand_over_report(record: Record, directory: RunDirectory, *, notify: Callable[[str], None]) -> Result:
    """Write result.json and report.html; the result says where they are."""
    files = {**record.result.files, "report": str(directory.report)}
    whole = dataclasses.replace(record, result=dataclasses.replace(record.result, files=files))
    write_atomically(directory.record, whole.to_text())
    try:
        write_atomically(directory.report, report_page(whole, directory.path))
    except Exception as error:  # hours of measurements are not lost for a picture
        notify(f"the report could not be drawn ({type(error).__name__}: {error}); `autofit report` tries again.")
        return record.result
    return whole.result
