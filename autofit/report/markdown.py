"""A result as Markdown, short enough for the description of a pull request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.measurement import Measurement
from autofit.core.quoting import markdown_code, markdown_text
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.core.strict_yaml import dump
from autofit.report.explain import how_it_ended, nothing_fits_lines
from autofit.report.formatting import (
    POINT,
    describe,
    gib,
    number,
    peak_gib,
    proof,
    rate,
    throughput,
    where,
)
from autofit.report.knob_effects import knob_lines
from autofit.report.other_budgets import other_budget_lines
from autofit.report.predicted import answer_line, predicted_lines, predicted_notes
from autofit.report.rows import Row, explored_at, table_rows

_ROWS = 6


def markdown(record: Record) -> str:
    """The answer, what came after it, what each knob buys, and where it was measured."""
    result = record.result
    if result.predicted_best is not None:
        parts = _predicted(result, result.predicted_best)
    elif result.best is None:
        parts = [markdown_text(line) for line in nothing_fits_lines(result)]
    else:
        rows = table_rows(result, tolerance=record.tolerance, rows=_ROWS)
        parts = [
            *_answer(result, result.best),
            _table_of(rows, throughput(result.best)[1]),
            markdown_text(explored_at(result, (row.measurement for row in rows))),
            _section("What each knob buys, if it alone is changed", knob_lines(result)),
            _section("With other budgets", other_budget_lines(result)),
            markdown_text(" ".join([how_it_ended(result), *result.notes])),
        ]
    head = f"### {markdown_text(result.model)} on {markdown_text(where(result.hardware, result.budget))}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return "\n\n".join(filter(None, [head, *parts, markdown_text(f"Versions: {versions}.")])) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column at the left and the others at the right."""
    titles, *cells = [list(map(markdown_text, row)) for row in (header, *rows)]
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *cells))


def _answer(result: Result, best: Measurement) -> list[str]:
    peak, step = peak_gib(best), best.step_seconds
    memory = f", {peak} of {gib(result.budget.device_bytes)} GiB at the peak" if peak else ""
    seconds = f", {step.median:.3g} s a step ({step.low:.3g} to {step.high:.3g})" if step else ""
    words = markdown_text(f"{memory}{seconds}, {proof(best)}: {describe(best.config)}.")
    answer = f"**{markdown_text(rate(best))}**{words}"
    return [answer, _details(best.config)]


def _predicted(result: Result, best: Estimate) -> list[str]:
    """What is predicted where nothing could be measured."""
    words = markdown_text(f"{answer_line(result, best)} {describe(best.config)}.")
    answer = f"**Predicted, not measured:** {words}"
    lines = [
        f"- {markdown_text(line.removeprefix(POINT))}"
        if line.startswith(POINT)
        else markdown_text(line)
        for line in (*predicted_lines(result, best), *predicted_notes(result))
    ]
    return [answer, *lines, _details(best.config)]


def _details(config: Mapping[str, Any]) -> str:
    return f"<details><summary>config</summary>\n\n{markdown_code(dump(dict(config)), 'yaml')}\n\n</details>"


def _table_of(rows: Iterable[Row], unit: str) -> str:
    cells = []
    for row in rows:
        one, (figure, _) = row.measurement, throughput(row.measurement)
        cells.append(
            (describe(one.config), number(figure) if figure else "", peak_gib(one), row.verdict)
        )
    return table(("config", f"{unit}/s", "peak GiB", "verdict"), cells)


def _section(title: str, lines: list[str]) -> str:
    return (
        "\n".join([f"**{title}**", "", *(f"- {markdown_text(line)}" for line in lines)])
        if lines
        else ""
    )
