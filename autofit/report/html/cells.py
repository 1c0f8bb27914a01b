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
from autofit.report.html.svg import Picture, Plot, Scale, polyline, width_of
from autofit.report.predicted import answer_line, predicted_lines, predicted_notes

_WIDTH = 480
_MOST_POINTS = 400  # of a curve
_CELL = '<td style="text-align: left">{}</td>'

Rows = list[tuple[str, str]]


@as_html.register
def result_html(result: Result) -> str:
    """The best config in words, how fast it is in how much memory, and every config that was
    measured."""
    estimate = result.predicted_best
    if estimate is not None:
        head = f"Nothing was measured. Predicted: {answer_line(result, estimate)}"
        notes = [*predicted_lines(result, estimate), *predicted_notes(result)]
        return _paragraph(head) + estimate_html(estimate) + _paragraph(*notes)

    best = result.best
    if best is None:
        return _paragraph(*nothing_fits_lines(result))

    rate, unit = throughput(best)
    figure = "?"
    if rate:
        figure = number(rate)
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
    place = where(result.hardware, result.budget)
    title = f"The best config for {result.model} on {place}"
    picture = scatter(Record(result), _WIDTH)
    return _section(title, rows, picture) + _paragraph(*summary(result))


@as_html.register
def estimate_html(estimate: Estimate) -> str:
    """Whether it fits, what the memory consists of, and where the time goes."""
    low = gib(estimate.low)
    high = gib(estimate.high)
    memory = f"{low} GiB"
    if low != high:
        memory = f"{low} to {high} GiB"

    budget = 0
    if estimate.budget:
        budget = estimate.budget.device_bytes
        verdict = FITS[estimate.fits(estimate.budget)]
        memory += f", {verdict} {gib(budget)} GiB"

    rows = [("Memory", memory)]
    parts = {}
    for part in PARTS:
        size = estimate.breakdown.get(part)
        if size:
            parts[part] = size
            name = KIND_WORDS.get(part, part)
            rows.append((f"- {name}", f"{gib(size)} GiB"))

    if estimate.step_seconds is not None:
        rows += _time(estimate, estimate.step_seconds)

    picture = None
    if parts:
        picture = _stack(parts, budget)

    title = f"Predicted: {describe(estimate.config)}"
    section = _section(title, rows, picture)
    return section + _paragraph(*estimate.notes)


def _time(estimate: Estimate, seconds: float) -> Rows:
    """How fast it is, and what bounds a step."""
    rates = []
    if estimate.tokens_per_second:
        rates.append(f"{number(estimate.tokens_per_second)} tokens/s")
    if estimate.samples_per_second:
        rates.append(f"{number(estimate.samples_per_second)} samples/s")

    step = f"{seconds:.3g} s"
    if estimate.bottleneck:
        step += f", {bound_by(estimate.bottleneck, estimate.config)}"
    if estimate.utilisation:
        step += f", {percent(estimate.utilisation)} of the peak rate put to use"

    return [("Speed", ", ".join(rates)), ("Step", step)]


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

    latest = [f"{loss:.4g}" for loss in evaluations[-5:]]
    if latest:
        rows.append(("Evaluation", ", ".join(latest)))

    if seconds:
        rate = number(samples / seconds)
        rows.append(("Speed", f"{rate} samples/s"))

    rows += _config(config)
    return _section("Trained", rows, _curve(losses))


def _config(config: Mapping[str, Any]) -> Rows:
    return [(title, words) for title, words, _ in config_rows(config)]


def _stack(parts: Mapping[str, int], budget: int) -> Picture:
    """What the peak consists of, as one bar; the budget, where there is one, is a line."""
    picture = Picture(_WIDTH, 44, "What the peak memory consists of")
    most = max(budget, sum(parts.values()))
    across = Scale(0.0, most * 1.02, 2, _WIDTH - 2)

    below = 0
    for part, size in parts.items():
        x = across(below)
        width = max(across(size) - across.start - 0.8, 0.5)
        kind = "peak"
        words = KIND_WORDS.get(part)
        if words:
            kind = f"band {part}"
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
        below += size

    if budget:
        x = across(budget)
        picture.line((x, 2), (x, 40), "budget")

    return picture


def _curve(losses: Sequence[float]) -> Picture | None:
    """The loss of every step, or of some of many; None of fewer than two."""
    last = len(losses)
    stride = max(1, last // _MOST_POINTS)
    drawn = {}
    for step in range(stride, last + 1, stride):
        loss = losses[step - 1]
        if math.isfinite(loss):
            drawn[step] = loss

    if len(drawn) < 2:
        return None

    lowest = min(drawn.values())
    highest = max(drawn.values())
    plot = Plot(
        (_WIDTH, 220),
        "The loss of every step",
        across=Scale(0.0, float(last), 52, _WIDTH - 10),
        up=Scale(min(lowest, highest * 0.999), highest, 220 - 44, 30),
    )
    plot.frame(("step", "loss"), ticks=(5, 4))

    places = [plot.at(step, loss) for step, loss in drawn.items()]
    plot.path(polyline(places), "leading")
    return plot


def _section(title: str, rows: Rows, picture: Picture | None) -> str:
    """A heading, a table, and a picture below it."""
    lines = ""
    for row in rows:
        cells = "".join(map(_CELL.format, map(html_text, row)))
        lines += f"<tr>{cells}</tr>"

    image = ""
    if picture:
        document = picture.document(picture_style(alone=True))
        encoded = base64.b64encode(document.encode())
        label = html_text(picture.label)
        source = f"data:image/svg+xml;base64,{encoded.decode()}"
        image = f'<img alt="{label}" src="{source}">'

    heading = f"<p><b>{html_text(title)}</b></p>"
    table = f"<table><tbody>{lines}</tbody></table>"
    return f"<div>{heading}{table}{image}</div>"


def _paragraph(*lines: str) -> str:
    """Lines as a paragraph; nothing without any."""
    texts = list(map(html_text, filter(None, lines)))
    if not texts:
        return ""
    return f"<p>{'<br>'.join(texts)}</p>"
