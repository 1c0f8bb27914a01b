"""`autofit models`."""

from autofit.cli.options import Json
from autofit.cli.output import print_answer
from autofit.models import describe_presets
from autofit.report.listings import models_table


def models(as_json: Json = False) -> int:
    """The models known by name, for --model.

    Example:
      autofit models
    """
    rows = describe_presets()
    return print_answer({"schema": 1, "models": rows}, models_table(rows), as_json)
