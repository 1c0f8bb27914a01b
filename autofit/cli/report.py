"""`autofit report`."""

import autofit.cli.options as options
from autofit.cli.output import heavy
from autofit.report.terminal import Terminal


def report(
    runs: options.Runs,
    form: options.Format = None,
    output: options.ReportOutput = None,
) -> int:
    """Write the report of a search again, its pictures or a summary; or compare two searches.

    Examples:
      autofit report run
      autofit report run --format md
      autofit report run other-run
    """
    shown = heavy("autofit.report.run_report", "report")(runs, form, output)
    if isinstance(shown, str):
        print(shown)
    else:
        Terminal().print(shown)
    return 0
