"""Sentences and lists as a terminal shows them: a point of a list that takes several lines stays right of its dash."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.report.formatting import printable

POINT = "  - "


def hanging(lines: Iterable[str]) -> RenderableType:
    """Lines, those that begin as points of a list hanging from their dashes. No bracket in them is markup."""
    return Group(*(_point(line) if line.startswith(POINT) else Text(printable(line)) for line in lines))


def _point(line: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(POINT.rstrip()), Text(printable(line.removeprefix(POINT))))
    return grid
