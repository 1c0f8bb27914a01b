"""What a search leaves in its run directory for whoever goes on with it: the result, a script that runs it, exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.core.result import Result
from autofit.core.run_directory import RunDirectory, write_whole
from autofit.core.workload import Workload
from autofit.export import train_script
from autofit.exports import export_all
from autofit.models import HuggingFaceModel
from autofit.report import single_changes


def hand_over(result: Result, workload: Workload, directory: RunDirectory, *, tell: Callable[[str], None]) -> Result:
    """Write result.yaml, exports and, of a model of transformers, train.py; the result says where they are."""
    files: dict[str, str | None] = {"result": None, "script": None, "exports": None, "report": None}
    result = dataclasses.replace(result, run_directory=str(directory.path))
    if result.best is None:
        return dataclasses.replace(result, files=files)
    write_whole(directory.result, result.to_yaml())
    files["result"] = str(directory.result)
    model = workload.model
    if isinstance(model, HuggingFaceModel):
        try:
            script = train_script(
                model=result.model,
                workload=result.workload,
                source=result.source,
                model_config=model.config,
                config=result.best.config,
                measured=result.best.to_measured(),
                versions=result.versions,
                changes=single_changes(result),
                hardware={**result.hardware.to_dict(), "budget_gib": round(result.budget.device_bytes / GIB, 3)},
            )
        except InputError as error:
            tell(str(error))
            script = None
        if script:
            write_whole(directory.script, script)
            files["script"] = str(directory.script)
    export_all(result, model, directory.exports, tell=tell)
    files["exports"] = str(directory.exports)
    return dataclasses.replace(result, files=files)
