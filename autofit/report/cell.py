"""The lines of a running search in the output of a notebook's cell: those of a terminal, drawn as HTML."""

from __future__ import annotations

import io
from collections.abc import Sequence
from threading import RLock

from rich.console import Console
from rich.text import Text

from autofit.core.notebook import Cell

_WIDTH, _HEIGHT = 100, 40
_FORMAT = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3">{code}</pre>'


class CellRegion:
    """As `Region`, in a cell. What it shows last stays: a notebook is read later, too."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.console = Console(
            file=io.StringIO(), record=True, width=_WIDTH, height=_HEIGHT, force_jupyter=False, color_system=None
        )
        self._cell = Cell()
        self._lines: list[Text] = []

    def start(self) -> None:
        """Nothing is in the way of what others print: cells keep it apart."""

    def stop(self) -> None:
        """Leave the lines where they are."""

    def draw(self, lines: Sequence[Text]) -> None:
        """Make the output these lines."""
        if list(lines) == self._lines:
            return
        self._lines = list(lines)
        for line in lines:
            self.console.print(line, no_wrap=True, crop=False)
        text = self.console.export_text(clear=False)
        self._cell.show(text, self.console.export_html(code_format=_FORMAT, inline_styles=True))
