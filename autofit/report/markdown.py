"""A result as Markdown, short enough for the description of a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import ended
from autofit.report.foretold import answer_line, foretold_lines, foretold_of
from autofit.report.formatting import describe, gib, may_be_missed, number, peak_bytes, rate, value, where
from autofit.report.hanging import POINT
from autofit.report.knob_effects import knob_lines
from autofit.report.nothing_fits import nothing_fits_lines, tried
from autofit.report.other_budgets import other_budget_lines
from autofit.report.rows import Standing, explored_at, standings

_ROWS = 6
_SPECIAL = str.maketrans({character: f"\\{character}" for character in r"\`*_[]<>|#"})


def markdown(record: Record) -> str:
    """The answer, what came after it, what each knob buys, and where it was measured."""
    result = record.result
    head = f"### {plain(result.model)} on {plain(where(result.hardware, result.budget))}"
    if result.predicted_best is not None:
        return _joined([head, _foretold(result, result.predicted_best), _versions(result)])
    if result.best is None:
        return _joined([head, "\n\n".join(map(plain, nothing_fits_lines(result))), _versions(result)])
    shown = standings(result, tolerance=record.tolerance, rows=_ROWS)
    parts = [
        head,
        _answer(result),
        _table_of(shown, result),
        plain(explored_at(result, (each.measurement for each in shown))),
        _section("What each knob buys, if it alone is changed", knob_lines(result)),
        _section("With other budgets", other_budget_lines(result)),
        plain(" ".join(filter(None, [tried(result), ended(result), may_be_missed(result.bound), *result.notes]))),
        _versions(result),
    ]
    return _joined(parts)


def plain(words: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return " ".join(words.split()).translate(_SPECIAL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column at the left and the others at the right."""
    lines = [list(map(plain, header)), ["---", *("---:" for _ in header[1:])], *(list(map(plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _answer(result: Result) -> str:
    best = result.best
    assert best, "there is an answer to tell"
    peak = peak_bytes(best)
    memory = f", {gib(peak)} of {gib(result.budget.device_bytes)} GiB at the peak" if peak else ""
    step = best.step_seconds
    seconds = f", {step.median:.3g} s a step ({step.low:.3g} to {step.high:.3g})" if step else ""
    proof = "verified in longer runs" if best.verified else "not verified"
    told = f"**{plain(rate(best))}**{plain(memory)}{plain(seconds)}, {proof}: {plain(describe(best.config))}."
    return f"{told}\n\n{_details(best.config)}"


def _foretold(result: Result, found: Estimate) -> str:
    """What is predicted where nothing could be measured."""
    told = f"**Predicted, not measured:** {plain(answer_line(result, found))} {plain(describe(found.config))}."
    said = [*foretold_lines(result, found), *foretold_of(result)]
    lines = [line.replace(POINT, "- ", 1) if line.startswith(POINT) else line for line in said]
    text = "\n\n".join(line[:2] + plain(line[2:]) if line.startswith("- ") else plain(line) for line in lines)
    return f"{told}\n\n{text}\n\n{_details(found.config)}"


def _details(config: Mapping[str, Any]) -> str:
    text = "\n".join(f"{knob}: {value(given)}" for knob, given in config.items())
    return f"<details><summary>config</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def _table_of(shown: Iterable[Standing], result: Result) -> str:
    unit = "tokens/s" if result.best and result.best.tokens_per_second else "samples/s"
    return table(("config", unit, "peak GiB", "verdict"), (_row(each) for each in shown))


def _row(standing: Standing) -> tuple[str, ...]:
    measurement = standing.measurement
    figure, peak = measurement.tokens_per_second or measurement.samples_per_second, peak_bytes(measurement)
    return (
        describe(measurement.config),
        number(figure) if figure else "",
        gib(peak) if peak else "",
        standing.verdict,
    )


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"**{title}**", "", *(f"- {plain(line)}" for line in lines)]) if lines else ""


def _versions(result: Result) -> str:
    return plain("Versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items()) + ".")


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
