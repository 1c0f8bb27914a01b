"""What is shown to people: the end of a search, its progress, and tables of plain data. Nothing here prints."""

from autofit.report.explain import explain, nothing_fits, nothing_fits_view
from autofit.report.formatting import drift_note
from autofit.report.knob_effects import single_changes
from autofit.report.listings import (
    around_table,
    cards_table,
    cleared_text,
    doctor_table,
    estimate_table,
    models_table,
    spaces_table,
    tools_table,
)
from autofit.report.live import LiveDisplay
from autofit.report.predicted import predicted_view
from autofit.report.table import result_table

__all__ = [
    "LiveDisplay",
    "around_table",
    "cards_table",
    "cleared_text",
    "doctor_table",
    "drift_note",
    "estimate_table",
    "explain",
    "models_table",
    "nothing_fits",
    "nothing_fits_view",
    "predicted_view",
    "result_table",
    "single_changes",
    "spaces_table",
    "tools_table",
]
