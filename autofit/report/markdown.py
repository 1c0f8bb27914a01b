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
    model = markdown_text(result.model)
    place = markdown_text(where(result.hardware, result.budget))
    parts = [f"### {model} on {place}"]

    if result.predicted_best is not None:
        parts += _predicted(result, result.predicted_best)
    elif result.best is not None:
        parts += _measured(record, result.best)
    else:
        parts += map(markdown_text, nothing_fits_lines(result))

    versions = []
    for package, version in result.versions.items():
        versions.append(f"{package} {version}")
    parts.append(markdown_text(f"Versions: {', '.join(versions)}."))

    paragraphs = filter(None, parts)
    return "\n\n".join(paragraphs) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column at the left and the others at the right."""
    rule = ["---:"] * len(header)
    rule[0] = "---"
    head = list(map(markdown_text, header))

    lines = [_line(head), _line(rule)]
    for row in rows:
        cells = map(markdown_text, row)
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def _measured(record: Record, best: Measurement) -> list[str]:
    """The best config, the others beside it, and what came of the search."""
    result = record.result
    figures = ""
    peak = peak_gib(best)
    if peak:
        budget = gib(result.budget.device_bytes)
        figures += f", {peak} of {budget} GiB at the peak"

    step = best.step_seconds
    if step:
        between = f"{step.low:.3g} to {step.high:.3g}"
        figures += f", {step.median:.3g} s a step ({between})"

    speed = markdown_text(rate(best))
    words = markdown_text(f"{figures}, {proof(best)}: {describe(best.config)}.")

    rows = table_rows(result, tolerance=record.tolerance, rows=_ROWS)
    shown = [row.measurement for row in rows]
    _, unit = throughput(best)
    ended = " ".join([how_it_ended(result), *result.notes])
    return [
        f"**{speed}**{words}",
        _details(best.config),
        _table_of(rows, unit),
        markdown_text(explored_at(result, shown)),
        _section("What each knob buys, if it alone is changed", knob_lines(result)),
        _section("With other budgets", other_budget_lines(result)),
        markdown_text(ended),
    ]


def _predicted(result: Result, best: Estimate) -> list[str]:
    """What is predicted where nothing could be measured."""
    answer = f"{answer_line(result, best)} {describe(best.config)}."
    parts = [f"**Predicted, not measured:** {markdown_text(answer)}"]

    lines = predicted_lines(result, best)
    lines += predicted_notes(result)
    for line in lines:
        is_point = line.startswith(POINT)
        text = markdown_text(line.removeprefix(POINT))
        if is_point:
            text = f"- {text}"
        parts.append(text)

    parts.append(_details(best.config))
    return parts


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
        lines.append(
            (
                describe(measurement.config),
                speed,
                peak_gib(measurement),
                row.verdict,
            )
        )

    return table(("config", f"{unit}/s", "peak GiB", "verdict"), lines)


def _section(title: str, lines: list[str]) -> str:
    """Points below a title; nothing without any."""
    if not lines:
        return ""
    points = [f"- {markdown_text(line)}" for line in lines]

    return "\n".join([f"**{title}**", "", *points])
