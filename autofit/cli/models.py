"""`autofit models`."""

from autofit.cli.options import Json
from autofit.cli.output import print_list
from autofit.models import describe_presets
from autofit.report import models_table


def models(as_json: Json = False) -> int:
    """The models known by name, for --model.

    Example:
      autofit models
    """
    return print_list("models", describe_presets(), models_table, as_json)
