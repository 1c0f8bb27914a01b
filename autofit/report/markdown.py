"""A result as Markdown, short enough for the description of a pull request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import how_it_ended, nothing_fits_lines
from autofit.report.formatting import POINT, describe, gib, number, peak_gib, proof, rate, throughput, value, where
from autofit.report.knob_effects import knob_lines
from autofit.report.other_budgets import other_budget_lines
from autofit.report.predicted import answer_line, predicted_lines, predicted_notes
from autofit.report.rows import Row, explored_at, table_rows

_ROWS = 6
_SPECIAL = str.maketrans({character: f"\\{character}" for character in r"\`*_[]<>|#"})


def markdown(record: Record) -> str:
    """The answer, what came after it, what each knob buys, and where it was measured."""
    result = record.result
    if result.predicted_best is not None:
        parts = _predicted(result, result.predicted_best)
    elif result.best is None:
        parts = [plain(line) for line in nothing_fits_lines(result)]
    else:
        rows = table_rows(result, tolerance=record.tolerance, rows=_ROWS)
        parts = [
            *_answer(result, result.best),
            _table_of(rows, throughput(result.best)[1]),
            plain(explored_at(result, (row.measurement for row in rows))),
            _section("What each knob buys, if it alone is changed", knob_lines(result)),
            _section("With other budgets", other_budget_lines(result)),
            plain(" ".join([how_it_ended(result), *result.notes])),
        ]
    head = f"### {plain(result.model)} on {plain(where(result.hardware, result.budget))}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return "\n\n".join(filter(None, [head, *parts, plain(f"Versions: {versions}.")])) + "\n"


def plain(words: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return " ".join(words.split()).translate(_SPECIAL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column at the left and the others at the right."""
    lines = [list(map(plain, header)), ["---", *("---:" for _ in header[1:])], *(list(map(plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _answer(result: Result, best: Measurement) -> list[str]:
    peak, step = peak_gib(best), best.step_seconds
    memory = f", {peak} of {gib(result.budget.device_bytes)} GiB at the peak" if peak else ""
    seconds = f", {step.median:.3g} s a step ({step.low:.3g} to {step.high:.3g})" if step else ""
    answer = f"**{plain(rate(best))}**{plain(memory)}{plain(seconds)}, {proof(best)}: {plain(describe(best.config))}."
    return [answer, _details(best.config)]


def _predicted(result: Result, best: Estimate) -> list[str]:
    """What is predicted where nothing could be measured."""
    answer = f"**Predicted, not measured:** {plain(answer_line(result, best))} {plain(describe(best.config))}."
    lines = [
        f"- {plain(line.removeprefix(POINT))}" if line.startswith(POINT) else plain(line)
        for line in (*predicted_lines(result, best), *predicted_notes(result))
    ]
    return [answer, *lines, _details(best.config)]


def _details(config: Mapping[str, Any]) -> str:
    text = "\n".join(f"{knob}: {value(given)}" for knob, given in config.items())
    return f"<details><summary>config</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def _table_of(rows: Iterable[Row], unit: str) -> str:
    cells = []
    for row in rows:
        one, (figure, _) = row.measurement, throughput(row.measurement)
        cells.append((describe(one.config), number(figure) if figure else "", peak_gib(one), row.verdict))
    return table(("config", f"{unit}/s", "peak GiB", "verdict"), cells)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"**{title}**", "", *(f"- {plain(line)}" for line in lines)]) if lines else ""
