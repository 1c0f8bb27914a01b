"""The end of a search: the answer, what came after it and why it lost, what was not tried, and what was written."""

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
    """The best, the best of each tier, the runner-ups and the nearest misses; `rows` bounds those below the best.
    `tolerance` is the one of the search, within which configs count as tied."""
    shown = table_rows(result, tolerance=tolerance, rows=rows)
    answer = _answer(result, result.best) if result.best else []
    budgets, hardware = other_budget_lines(result), result.hardware
    card = (
        [f"Speed measured on {hardware.measured_on}, memory for {hardware.name}."]
        if hardware.measured_on
        else []
    )
    sentences = [
        [explored_at(result, (row.measurement for row in shown))],
        [how_it_ended(result)],
        ["With other budgets:", *(fmt.POINT + line for line in budgets)] if budgets else [],
        [*card, *result.notes],
    ]
    parts = (*(fmt.hanging(lines) for lines in sentences if any(lines)), written(result))
    first, *others = (part for part in parts if part is not None)
    tiers = tiers_table(result)
    side_by_side = [Text(), tiers] if tiers else []
    return Group(
        *answer,
        *side_by_side,
        _Rows(shown, result),
        first,
        *(line for part in others for line in (Text(), part)),
    )


def _answer(result: Result, best: Measurement) -> list[RenderableType]:
    peak, step = fmt.peak_gib(best), fmt.step(best)
    memory = f" in {peak} of {fmt.gib(result.budget.device_bytes)} GiB" if peak else ""
    of = one_line(
        f": the best config for {result.model} on {result.hardware.title}, {fmt.proof(best)}."
    )
    # It trains something else than the whole batch would: whoever reads one line alone must know.
    of += "".join(f" {warning}" for warning in best.warnings if warning.startswith(BATCH_NORM))
    config = Padding(Text(fmt.describe(best.config), "bold"), (0, 0, 0, 2), expand=False)
    lines: list[RenderableType] = [Text.assemble((f"{fmt.rate(best)}{memory}", "bold"), of), config]
    if step:
        lines.append(Text(step))
    directory = directory_of(result)
    if directory is not None and result.files.get("result"):
        title, command = commands(result, directory)[0]
        python = lines_of(command)
        shown = map(_line, python) if len(python) > 1 else [_Command(command)]
        lines += [Text(f"{title} with it:"), *shown]
    return lines


@dataclass(frozen=True)
class _Rows:
    """The table, with the columns there is room for: the others are in the report."""

    rows: Sequence[Row]
    result: Result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        unit = (
            "tokens" if any(row.measurement.tokens_per_second for row in self.rows) else "samples"
        )
        titles = (f"{unit}/s", *(["step s"] if wide else []), "peak GiB")
        figures = (Column(title, justify="right", overflow="fold") for title in titles)
        table = fmt.table(
            *figures, Column("against the best, and what it has instead", overflow="fold")
        )
        for row in self.rows:
            one = row.measurement
            figure, step = fmt.throughput(one)[0], one.step_seconds
            # Of the step three figures, zeros too, so that the numbers of a column stand below one another.
            seconds = f"{step.median:#.3g}".removesuffix(".") if step else "-"
            cells = [
                fmt.number(figure) if figure else "-",
                *([seconds] if wide else []),
                fmt.peak_gib(one) or "-",
            ]
            table.add_row(
                *map(Text, (*cells, self._verdict(row))), style="bold" if row.best else ""
            )
        yield table

    def _verdict(self, row: Row) -> str:
        other = "" if row.best else fmt.instead(row.measurement.config, self.result.best)
        if not other:
            return one_line(row.verdict)
        again = fmt.verified(row.measurement)
        verdict = one_line(row.verdict).removesuffix(f", {again}") + (
            "" if row.measurement.fits else ","
        )
        return f"{verdict} with {other}{again and f'; {again}'}"


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
