"""The end of a search: the answer, what came after it and why it lost, what was not tried, and what
was written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from autofit.core.measurement import BATCH_NORM, Measurement
from autofit.core.quoting import lines_of, one_line
from autofit.core.result import Result
from autofit.report import formatting as fmt
from autofit.report.explain import how_it_ended
from autofit.report.next_steps import commands, directory_of, written
from autofit.report.other_budgets import other_budget_lines
from autofit.report.rows import Row, explored_at, table_rows
from autofit.report.tiers import tiers_table

_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # of a shell's line, as shlex quotes it
_WIDE = 64  # columns from which the time of a step has one of its own


def result_table(result: Result, *, tolerance: float = 0.03, rows: int = 6) -> RenderableType:
    """The best, the best of each tier, the runner-ups and the nearest misses.

    Args:
        tolerance: that of the search, within which configs count as tied.
        rows: at most so many below the best.
    """
    shown = table_rows(result, tolerance=tolerance, rows=rows)
    parts: list[RenderableType] = []
    if result.best:
        parts += _answer(result, result.best)
    tiers = tiers_table(result)
    if tiers:
        parts += [Text(), tiers]
    parts.append(_Rows(shown, result))

    # each below an empty line, but for the first
    explored = explored_at(result, (row.measurement for row in shown))
    budgets = fmt.points("With other budgets:", other_budget_lines(result))
    texts = ([explored], [how_it_ended(result)], budgets, _notes(result))
    paragraphs = [fmt.hanging(lines) for lines in texts if any(lines)]
    files = written(result)
    if files is not None:
        paragraphs.append(files)

    for number, paragraph in enumerate(paragraphs):
        if number:
            parts.append(Text())
        parts.append(paragraph)

    return Group(*parts)


def _notes(result: Result) -> list[str]:
    """The notes of a result, after whose memory and whose speed the figures are."""
    hardware = result.hardware
    notes = list(result.notes)
    if hardware.measured_on:
        notes.insert(0, f"Speed measured on {hardware.measured_on}, memory for {hardware.name}.")

    return notes


def _answer(result: Result, best: Measurement) -> list[RenderableType]:
    """The best config, what it does, and how to train with it."""
    figures = fmt.rate(best)
    peak = fmt.peak_gib(best)
    if peak:
        figures += f" in {peak} of {fmt.gib(result.budget.device_bytes)} GiB"

    of = f": the best config for {result.model} on {result.hardware.title}, {fmt.proof(best)}."
    of = one_line(of)
    # It trains something else than the whole batch would: whoever reads one line alone must know.
    for warning in best.warnings:
        if warning.startswith(BATCH_NORM):
            of += f" {warning}"

    config = Padding(
        Text(fmt.describe(best.config), "bold"),
        (0, 0, 0, 2),
        expand=False,
    )
    lines: list[RenderableType] = [Text.assemble((figures, "bold"), of), config]
    step = fmt.step(best)
    if step:
        lines.append(Text(step))

    directory = directory_of(result)
    if directory is not None and result.files.get("result"):
        title, command = commands(result, directory)[0]
        lines.append(Text(f"{title} with it:"))
        python = lines_of(command)
        if len(python) > 1:
            lines += map(_line, python)
        else:
            lines.append(_Command(command))

    return lines


@dataclass(frozen=True)
class _Rows:
    """The table, with the columns there is room for: the others are in the report."""

    rows: Sequence[Row]
    result: Result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _WIDE
        titles = ["samples/s"]
        if any(row.measurement.tokens_per_second for row in self.rows):
            titles = ["tokens/s"]
        if is_wide:
            titles.append("step s")
        titles.append("peak GiB")

        columns = [Column(title, justify="right", overflow="fold") for title in titles]
        columns.append(Column("against the best, and what it has instead", overflow="fold"))
        table = fmt.table(*columns)
        for row in self.rows:
            figure, _ = fmt.throughput(row.measurement)
            speed = "-"
            if figure:
                speed = fmt.number(figure)

            cells = [speed]
            if is_wide:
                cells.append(_seconds(row.measurement))
            cells += [fmt.peak_gib(row.measurement) or "-", self._verdict(row)]

            style = ""
            if row.best:
                style = "bold"
            table.add_row(*map(Text, cells), style=style)

        yield table

    def _verdict(self, row: Row) -> str:
        """What a row says of itself, and what it has instead of the best's knobs."""
        other = ""
        if not row.best:
            other = fmt.instead(row.measurement.config, self.result.best)
        if not other:
            return one_line(row.verdict)

        again = fmt.verified(row.measurement)
        verdict = one_line(row.verdict).removesuffix(f", {again}")
        if not row.measurement.fits:
            verdict += ","
        verdict += f" with {other}"
        if again:
            verdict += f"; {again}"

        return verdict


def _seconds(measurement: Measurement) -> str:
    """How long a step takes, or a dash."""
    step = measurement.step_seconds
    if not step:
        return "-"
    # three figures, zeros too, so that the numbers of a column stand below one another
    return f"{step.median:#.3g}".removesuffix(".")


def _line(text: str) -> Text:
    """A line to copy, however long it is."""
    return Text(f"  {text}", no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class _Command:
    """A shell's line to copy: one too long goes on as a shell reads it, before an option."""

    command: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *words = _WORD.findall(self.command)
        parts = [first]
        for word in words:
            if word.startswith("--"):
                parts.append(word)
            else:
                parts[-1] += f" {word}"

        lines = [parts[0]]
        for part in parts[1:]:
            longer = f"{lines[-1]} {part}"
            if cell_len(longer) + 4 > options.max_width:
                lines[-1] += " \\"
                lines.append(f"    {part}")
            else:
                lines[-1] = longer

        yield from map(_line, lines)
