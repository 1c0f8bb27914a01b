"""The end of a search: the answer, what came after it and why it lost, what was not tried, and what was written."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.explain import ended
from autofit.report.formatting import describe, gib, instead, may_be_missed, number, peak_bytes, printable, rate
from autofit.report.hanging import POINT, hanging
from autofit.report.next_steps import commands, directory_of, written
from autofit.report.nothing_fits import tried
from autofit.report.other_budgets import other_budget_lines
from autofit.report.rows import Standing, explored_at, standings

_WIDE = 64  # columns from which the time of a step has one of its own


def result_table(result: Result, *, tolerance: float = 0.03, rows: int = 6) -> RenderableType:
    """The best, the best of each tier, the runner-ups and the nearest misses; `rows` bounds those below the best.

    `tolerance` is the one of the search, within which configs count as tied.
    """
    shown = standings(result, tolerance=tolerance, rows=rows)
    table = _Standings(shown, result)  # with a blank line of its own around
    files = written(result)
    parts: list[list[RenderableType]] = [
        [*(_answer(result, result.best) if result.best else []), table],
        _sentences(explored_at(result, (each.measurement for each in shown))),
        _sentences(tried(result), ended(result), may_be_missed(result.bound) if result.best else ""),
        _other_budgets(result),
        _notes(result),
        [files] if files else [],
    ]
    told = [part for part in parts if part]
    return Group(*(line for place, part in enumerate(told) for line in ([Text()] * (place > 1) + part)))


def _answer(result: Result, best: Measurement) -> list[RenderableType]:
    peak, step = peak_bytes(best), best.step_seconds
    memory = f" in {gib(peak)} of {gib(result.budget.device_bytes)} GiB" if peak else ""
    proof = "verified in longer runs" if best.verified else "not verified"
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{rate(best)}{memory}", "bold"),
            printable(f": the best config for {result.model} on {result.hardware.name}, {proof}."),
        ),
        _indented(Text(describe(best.config), "bold")),
    ]
    if step:
        lines.append(Text(f"A step takes {step.median:.3g} s ({step.low:.3g} to {step.high:.3g})."))
    directory = directory_of(result)
    if directory is not None and result.files.get("result"):
        title, command = commands(result, directory)[0]
        lines += [Text(f"{title} with it:"), *(_Command(line) for line in command.splitlines())]
    return lines


class _Standings:
    """The table, with what there is room for: the rest is in the report."""

    def __init__(self, shown: list[Standing], result: Result) -> None:
        self._shown, self._result = shown, result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, expand=False)
        unit = "tokens" if any(each.measurement.tokens_per_second for each in self._shown) else "samples"
        for title in (f"{unit}/s", *(["step s"] if wide else []), "peak GiB"):
            table.add_column(title, justify="right", overflow="fold")
        table.add_column("against the best, and what it has instead", overflow="fold")
        for standing in self._shown:
            rate, step, peak = _figures(standing.measurement)
            cells = [Text(each) for each in ([rate, step, peak] if wide else [rate, peak])]
            table.add_row(*cells, self._verdict(standing), style="bold" if standing.best else "")
        yield table

    def _verdict(self, standing: Standing) -> Text:
        other = "" if standing.best else instead(standing.measurement.config, self._result.best)
        if not other:
            return Text(printable(standing.verdict))  # a Text, so that brackets in a reason are no markup
        verdict = printable(standing.verdict).removesuffix(", verified") + ("" if standing.measurement.fits else ",")
        return Text(f"{verdict} with {other}{'; verified' if standing.measurement.verified else ''}")


def _figures(measurement: Measurement) -> tuple[str, str, str]:
    figure, step = measurement.tokens_per_second or measurement.samples_per_second, measurement.step_seconds
    peak = peak_bytes(measurement)
    # Of the step three figures, zeros too, so that the numbers of a column stand below one another.
    seconds = f"{step.median:#.3g}".removesuffix(".") if step else "-"
    return number(figure) if figure else "-", seconds, gib(peak) if peak else "-"


class _Command:
    """A line that is there to be copied: where it is too long it goes on as a shell reads it, between two words."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[str] = []
        indent = "  "
        for word in self._command.split(" --"):
            longer = f"{lines[-1]} --{word}" if lines else indent + word
            if lines and cell_len(longer) + 2 > options.max_width:
                lines[-1] += " \\"
                lines.append(f"{2 * indent}  --{word}")
            else:
                lines[-1:] = [longer]
        for line in lines:
            yield Text(line, no_wrap=True, overflow="ignore")


def _sentences(*each: str) -> list[RenderableType]:
    told = " ".join(filter(None, each))
    return [hanging([told])] if told else []


def _other_budgets(result: Result) -> list[RenderableType]:
    lines = other_budget_lines(result)
    return [hanging(["With other budgets:", *(POINT + line for line in lines)])] if lines else []


def _notes(result: Result) -> list[RenderableType]:
    hardware = result.hardware
    here = [f"Speed measured on {hardware.measured_on}, memory for {hardware.name}."] if hardware.measured_on else []
    notes = [*here, *result.notes]
    return [hanging(notes)] if notes else []


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2), expand=False)
