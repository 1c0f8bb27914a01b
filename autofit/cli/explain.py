"""`autofit explain`."""

from autofit.cli.options import Run
from autofit.cli.output import heavy


def explain(run: Run) -> int:
    """Why the config of a search is the best, what each knob buys, and what other budgets would run.

    Example:
      autofit explain run
    """
    print(heavy("autofit.report.explain", "explain")(run))
    return 0
