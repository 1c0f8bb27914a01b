"""The end of a search as a table: what won, what came after, and why it lost."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.more_memory import other_budget_lines
from autofit.report.standing import Standing, explored_at, standings
from autofit.report.words import describe, gib, knobs_that_differ, may_be_missed, number, peak_bytes, where


def result_table(result: Result, *, tolerance: float = 0.03, rows: int = 6) -> RenderableType:
    """The best, the best of each tier, the runner-ups and the nearest misses; `rows` bounds those below the best.

    `tolerance` is the one of the search, within which configs count as tied.
    """
    shown = standings(result, tolerance=tolerance, rows=rows)
    configs = [each.measurement.config for each in shown]
    differing = knobs_that_differ(configs)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, expand=False)
    table.add_column("config", ratio=4, overflow="fold")
    table.add_column(f"{_unit(shown)}/s", justify="right", overflow="fold")
    table.add_column("step s", justify="right", overflow="fold")
    table.add_column(f"peak GiB of {gib(result.budget.device_bytes)}", justify="right", max_width=8)
    table.add_column("", ratio=3, overflow="fold")
    for standing in shown:
        table.add_row(*_cells(standing, differing), style="bold" if standing.best else "")
    return Group(Text(f"{result.model} on {where(result.hardware, result.budget)}"), table, *_below(result, differing))


def _unit(shown: list[Standing]) -> str:
    return "tokens" if any(each.measurement.tokens_per_second for each in shown) else "samples"


def _cells(standing: Standing, differing: list[str]) -> list[Text]:
    measurement = standing.measurement
    peak = peak_bytes(measurement)
    figure = measurement.tokens_per_second or measurement.samples_per_second
    cells = [
        describe(measurement.config, differing) or describe(measurement.config),
        number(figure) if figure else "-",
        _step(measurement),
        gib(peak) if peak else "-",
        standing.verdict,
    ]
    return [Text(cell) for cell in cells]  # as Text, so that brackets in a reason are no markup


def _step(measurement: Measurement) -> str:
    step = measurement.step_seconds
    return f"{_figure(step.median)}\n{_figure(step.low)}-{_figure(step.high)}" if step else "-"


def _figure(seconds: float) -> str:
    """Three figures, zeros too, so that the numbers of a column stand below one another."""
    return f"{seconds:#.3g}".removesuffix(".")


def _below(result: Result, differing: list[str]) -> list[Text]:
    """What all rows share, and what else is worth knowing."""
    lines = []
    if result.best is not None:
        common = {name: each for name, each in result.best.config.items() if name not in differing}
        if describe(common):
            lines.append(f"In all of them: {describe(common)}.")
    lines += filter(None, [explored_at(result)])
    if result.best is not None and result.bound is not None:
        lines.append(may_be_missed(result.bound))
    others = other_budget_lines(result)
    if others:
        lines += ["With other budgets:", *(f"  - {line}" for line in others)]
    if result.hardware.measured_on:
        lines.append(f"Speed measured on {result.hardware.measured_on}, memory for {result.hardware.name}.")
    lines += result.notes
    lines += [f"Written: {path}" for path in result.files.values() if path]
    return [Text(line) for line in lines]
