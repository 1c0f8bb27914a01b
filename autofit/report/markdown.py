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
    place = where(result.hardware, result.budget)
    parts = [f"### {markdown_text(result.model)} on {markdown_text(place)}"]

    if result.predicted_best is not None:
        parts += _predicted(result, result.predicted_best)
    elif result.best is None:
        parts += map(markdown_text, nothing_fits_lines(result))
    else:
        parts += _answer(result, result.best)
        rows = table_rows(result, tolerance=record.tolerance, rows=_ROWS)
        _, unit = throughput(result.best)
        parts.append(_table_of(rows, unit))
        shown = [row.measurement for row in rows]
        parts.append(markdown_text(explored_at(result, shown)))
        parts.append(_section("What each knob buys, if it alone is changed", knob_lines(result)))
        parts.append(_section("With other budgets", other_budget_lines(result)))
        parts.append(markdown_text(" ".join([how_it_ended(result), *result.notes])))

    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    parts.append(markdown_text(f"Versions: {versions}."))
    return "\n\n".join(filter(None, parts)) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column at the left and the others at the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [list(map(markdown_text, row)) for row in (header, *rows)]
    lines.insert(1, rule)

    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _answer(result: Result, best: Measurement) -> list[str]:
    """The best config and what it does."""
    figures = ""
    peak = peak_gib(best)
    if peak:
        figures += f", {peak} of {gib(result.budget.device_bytes)} GiB at the peak"
    step = best.step_seconds
    if step:
        figures += f", {step.median:.3g} s a step ({step.low:.3g} to {step.high:.3g})"

    words = markdown_text(f"{figures}, {proof(best)}: {describe(best.config)}.")
    return [f"**{markdown_text(rate(best))}**{words}", _details(best.config)]


def _predicted(result: Result, best: Estimate) -> list[str]:
    """What is predicted where nothing could be measured."""
    words = markdown_text(f"{answer_line(result, best)} {describe(best.config)}.")
    parts = [f"**Predicted, not measured:** {words}"]
    for line in (*predicted_lines(result, best), *predicted_notes(result)):
        text = markdown_text(line.removeprefix(POINT))
        if line.startswith(POINT):
            text = f"- {text}"
        parts.append(text)

    return [*parts, _details(best.config)]


def _details(config: Mapping[str, Any]) -> str:
    """The config as YAML, folded away."""
    code = markdown_code(dump(dict(config)), "yaml")
    return f"<details><summary>config</summary>\n\n{code}\n\n</details>"


def _table_of(rows: Iterable[Row], unit: str) -> str:
    lines = []
    for row in rows:
        measurement = row.measurement
        figure, _ = throughput(measurement)
        speed = ""
        if figure:
            speed = number(figure)
        lines.append((describe(measurement.config), speed, peak_gib(measurement), row.verdict))

    return table(("config", f"{unit}/s", "peak GiB", "verdict"), lines)


def _section(title: str, lines: list[str]) -> str:
    """Points below a title; nothing without any."""
    if not lines:
        return ""
    points = [f"- {markdown_text(line)}" for line in lines]

    return "\n".join([f"**{title}**", "", *points])
