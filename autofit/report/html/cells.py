"""What a notebook shows of a result, an estimate and a training: a small table and a picture, as
HTML of its own.

Pictures are images, so that their style stays theirs and the page's stays the notebook's.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.estimate import PARTS, Estimate
from autofit.core.notebook import as_html
from autofit.core.quoting import html_text
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import nothing_fits_lines, summary
from autofit.report.formatting import (
    FITS,
    bound_by,
    describe,
    gib,
    number,
    percent,
    proof,
    throughput,
    where,
)
from autofit.report.html.knob_names import config_rows
from autofit.report.html.memory import KIND_WORDS
from autofit.report.html.page import memory_used, picture_style, step_words
from autofit.report.html.scatter import scatter
from autofit.report.html.svg import Picture, Scale, polyline, width_of
from autofit.report.predicted import answer_line, predicted_lines, predicted_notes

_WIDTH = 480
_MOST_POINTS = 400  # of a curve
_CELL = '<td style="text-align: left">{}</td>'

Rows = list[tuple[str, str]]


@as_html.register
def result_html(result: Result) -> str:
    """The best config in words, how fast it is in how much memory, and every config that was
    measured."""
    best = result.best
    if result.predicted_best is not None:
        estimate = result.predicted_best
        head = _paragraph(f"Nothing was measured. Predicted: {answer_line(result, estimate)}")
        notes = (*predicted_lines(result, estimate), *predicted_notes(result))

        return head + estimate_html(estimate) + _paragraph(*notes)

    if best is None:
        return _paragraph(*nothing_fits_lines(result))

    rate, unit = throughput(best)
    figure = number(rate) if rate else "?"
    rows = [("Speed", f"{figure} {unit} per second, {proof(best)}")]
    step = step_words(best)
    if step:
        rows.append(("Step", step))
    memory = memory_used(best, result)
    if memory:
        used, share = memory
        budget = gib(result.budget.device_bytes)
        rows.append(("Memory", f"{used} of {budget} GiB, {percent(share)}"))

    rows += _config(best.config)

    title = f"The best config for {result.model} on {where(result.hardware, result.budget)}"
    section = _section(title, rows, scatter(Record(result), _WIDTH))
    return section + _paragraph(*summary(result))


@as_html.register
def estimate_html(estimate: Estimate) -> str:
    """Whether it fits, what the memory consists of, and where the time goes."""
    low = gib(estimate.low)
    high = gib(estimate.high)
    memory = f"{low} GiB" if low == high else f"{low} to {high} GiB"
    budget = 0
    if estimate.budget:
        budget = estimate.budget.device_bytes
        memory += f", {FITS[estimate.fits(estimate.budget)]} {gib(budget)} GiB"

    rows = [("Memory", memory)]
    parts = {}
    for part in PARTS:
        size = estimate.breakdown.get(part)
        if size:
            parts[part] = size
            rows.append((f"- {KIND_WORDS.get(part, part)}", f"{gib(size)} GiB"))

    if estimate.step_seconds is not None:
        rates = []
        if estimate.tokens_per_second:
            rates.append(f"{number(estimate.tokens_per_second)} tokens/s")
        if estimate.samples_per_second:
            rates.append(f"{number(estimate.samples_per_second)} samples/s")
        rows.append(("Speed", ", ".join(rates)))

        step = f"{estimate.step_seconds:.3g} s"
        if estimate.bottleneck:
            step += f", {bound_by(estimate.bottleneck, estimate.config)}"
        if estimate.utilisation:
            step += f", {percent(estimate.utilisation)} of the peak rate put to use"
        rows.append(("Step", step))

    picture = _stack(parts, budget) if parts else None
    section = _section(f"Predicted: {describe(estimate.config)}", rows, picture)
    return section + _paragraph(*estimate.notes)


def trained_html(
    losses: Sequence[float],
    evaluations: Sequence[float],
    config: Mapping[str, Any],
    *,
    samples: int,
    seconds: float,
) -> str:
    """How far training came, how fast, and the loss of every step."""
    rows = [("Steps", f"{len(losses):,} ({samples:,} samples)")]
    if losses:
        rows.append(("Loss", f"{losses[0]:.4g} at first, {losses[-1]:.4g} at last"))
    if evaluations:
        rows.append(("Evaluation", ", ".join(f"{loss:.4g}" for loss in evaluations[-5:])))
    if seconds:
        rows.append(("Speed", f"{number(samples / seconds)} samples/s"))

    return _section("Trained", rows + _config(config), _curve(losses))


def _config(config: Mapping[str, Any]) -> Rows:
    return [(title, words) for title, words, _ in config_rows(config)]


def _stack(parts: Mapping[str, int], budget: int) -> Picture:
    """What the peak consists of, as one bar; the budget, where there is one, is a line."""
    picture = Picture(_WIDTH, 44, "What the peak memory consists of")
    across = Scale(0.0, max(budget, sum(parts.values())) * 1.02, 2, _WIDTH - 2)
    before = 0
    for part, size in parts.items():
        x = across(before)
        width = max(across(size) - across(0) - 0.8, 0.5)
        words = KIND_WORDS.get(part)
        kind = f"band {part}" if words else "peak"
        picture.draw(
            "rect",
            x=x,
            y=8,
            width=width,
            height=26,
            kind=kind,
        )
        if words and width_of(words) < width - 8:
            picture.text(x + 5, 25, words, kind=f"inside {part}")
        before += size

    if budget:
        x = across(budget)
        picture.line((x, 2), (x, 40), "budget")

    return picture


def _curve(losses: Sequence[float]) -> Picture | None:
    """The loss of every step, or of some of many; None of fewer than two."""
    every = max(1, len(losses) // _MOST_POINTS)
    drawn = {step: losses[step - 1] for step in range(every, len(losses) + 1, every)}
    drawn = {step: loss for step, loss in drawn.items() if math.isfinite(loss)}
    if len(drawn) < 2:
        return None

    lowest = min(drawn.values())
    highest = max(drawn.values())
    across = Scale(0.0, float(len(losses)), 52, _WIDTH - 10)
    up = Scale(min(lowest, highest * 0.999), highest, 220 - 44, 30)
    picture = Picture(_WIDTH, 220, "The loss of every step")
    picture.frame(across, up, titles=("step", "loss"), ticks=(5, 4))
    places = [(across(step), up(loss)) for step, loss in drawn.items()]
    picture.draw("path", d=polyline(places), kind="leading")

    return picture


def _section(title: str, rows: Rows, picture: Picture | None) -> str:
    """A heading, a table, and a picture below it."""
    lines = ""
    for row in rows:
        cells = "".join(_CELL.format(html_text(words)) for words in row)
        lines += f"<tr>{cells}</tr>"

    image = ""
    if picture:
        document = picture.document(picture_style(alone=True))
        drawn = base64.b64encode(document.encode()).decode()
        image = f'<img alt="{html_text(picture.label)}" src="data:image/svg+xml;base64,{drawn}">'

    table = f"<table><tbody>{lines}</tbody></table>"
    return f"<div><p><b>{html_text(title)}</b></p>{table}{image}</div>"


def _paragraph(*lines: str) -> str:
    text = "<br>".join(html_text(line) for line in lines if line)
    return f"<p>{text}</p>" if text else ""
