"""The report as a page of its own: the answer first, then pictures, then every trial."""

from autofit.report.html.cells import trained_html
from autofit.report.html.page import picture_style, pictures, report_page

__all__ = ["picture_style", "pictures", "report_page", "trained_html"]
