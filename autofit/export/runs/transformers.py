"""transformers' Trainer, in the script that is exported beside its arguments: what a user's own
script does otherwise is not known."""

from collections.abc import Mapping

from autofit.export.runs.run import OF_TRAINER, ToolRun, trainer_keys
from autofit.export.source import ExportSource
from autofit.export.tool import write
from autofit.export.tools.transformers import TOOL

_SCRIPT = "train_transformers.py"


def _script(source: ExportSource) -> Mapping[str, str]:
    return {_SCRIPT: write(TOOL, source).files[_SCRIPT]}


RUN = ToolRun(
    tool=TOOL,
    package="transformers",
    file=TOOL.file,
    program=lambda keys: (_SCRIPT,),
    keys=lambda keys, stage: trainer_keys(stage),
    without=OF_TRAINER,
    last=lambda stage: (str(stage.tokens),),
    names_file=False,
    beside=_script,
)
