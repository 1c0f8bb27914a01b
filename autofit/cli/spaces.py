"""`autofit spaces`."""

from autofit.cli.options import Json
from autofit.cli.output import heavy, print_answer
from autofit.report.listings import spaces_table


def spaces(as_json: Json = False) -> int:
    """The search spaces that ship with autofit, for --space, and how many configs each holds.

    Example:
      autofit spaces
    """
    data = heavy("autofit.api.spaces", "describe_spaces")()
    return print_answer(data, spaces_table(data["spaces"], data["counted_for"]), as_json)
