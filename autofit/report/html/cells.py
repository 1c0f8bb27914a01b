"""What a notebook shows of a result, an estimate and a training: a small table and a picture, as HTML of its own.
Pictures are images, so that their style stays theirs and the page's stays the notebook's."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autofit.core.estimate import PARTS, Estimate
from autofit.core.notebook import as_html
from autofit.core.quoting import html_text
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import nothing_fits_lines, summary
from autofit.report.formatting import FITS, describe, gib, number, percent, proof, throughput, where
from autofit.report.html.knob_names import config_rows
from autofit.report.html.memory import KIND_WORDS
from autofit.report.html.page import memory_used, picture_style, step_words
from autofit.report.html.scatter import scatter
from autofit.report.html.svg import Picture, Scale, width_of
from autofit.report.predicted import answer_line, predicted_lines, predicted_notes

_WIDTH = 480
_MOST_POINTS = 400  # of a curve

Rows = Iterable[tuple[str, str]]


@as_html.register
def result_html(result: Result) -> str:
    """The best config in words, how fast it is in how much memory, and every config that was measured."""
    best = result.best
    if result.predicted_best is not None:
        estimate = result.predicted_best
        head = _paragraph(f"Nothing was measured. Predicted: {answer_line(result, estimate)}")
        notes = (*predicted_lines(result, estimate), *predicted_notes(result))
        return head + estimate_html(estimate) + _paragraph(*notes)
    if best is None:
        return _paragraph(*nothing_fits_lines(result))
    rate, unit = throughput(best)
    used, share = memory_used(best, result) or ("", 0.0)
    rows = [
        ("Speed", f"{number(rate) if rate else '?'} {unit} per second, {proof(best)}"),
        ("Step", step_words(best)),
        (
            "Memory",
            f"{used} of {gib(result.budget.device_bytes)} GiB, {percent(share)}" if used else "",
        ),
    ]
    title = f"The best config for {result.model} on {where(result.hardware, result.budget)}"
    shown = [*(row for row in rows if row[1]), *_config(best.config)]
    return _section(title, shown, scatter(Record(result), _WIDTH)) + _paragraph(*summary(result))


@as_html.register
def estimate_html(estimate: Estimate) -> str:
    """Whether it fits, what the memory consists of, and where the time goes."""
    low, high, budget = gib(estimate.low), gib(estimate.high), estimate.budget
    expected = f"{low} GiB" if low == high else f"{low} to {high} GiB"
    verdict = f", {FITS[estimate.fits(budget)]} {gib(budget.device_bytes)} GiB" if budget else ""
    parts = {part: size for part in PARTS if (size := estimate.breakdown.get(part))}
    rows = [("Memory", f"{expected}{verdict}")]
    rows += [
        (f"- {KIND_WORDS.get(part, part)}", f"{gib(size)} GiB") for part, size in parts.items()
    ]
    if estimate.step_seconds is not None:
        figures = {"tokens/s": estimate.tokens_per_second, "samples/s": estimate.samples_per_second}
        bound = f", bound by {estimate.bottleneck}" if estimate.bottleneck else ""
        use = (
            f", {percent(estimate.utilisation)} of the peak rate put to use"
            if estimate.utilisation
            else ""
        )
        rows.append(
            (
                "Speed",
                ", ".join(f"{number(figure)} {unit}" for unit, figure in figures.items() if figure),
            )
        )
        rows.append(("Step", f"{estimate.step_seconds:.3g} s{bound}{use}"))
    picture = _stack(parts, budget.device_bytes if budget else 0) if parts else None
    return _section(f"Predicted: {describe(estimate.config)}", rows, picture) + _paragraph(
        *estimate.notes
    )


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
    return _section("Trained", [*rows, *_config(config)], _curve(losses))


def _config(config: Mapping[str, Any]) -> Rows:
    return ((title, words) for title, words, _ in config_rows(config))


def _stack(parts: Mapping[str, int], budget: int) -> Picture:
    """What the peak consists of, as one bar; the budget is a line."""
    picture = Picture(_WIDTH, 44, "What the peak memory consists of")
    across = Scale(0.0, max(budget, sum(parts.values())) * 1.02, 2, _WIDTH - 2)
    before = 0
    for part, size in parts.items():
        x, width = across(before), max(across(size) - across(0) - 0.8, 0.5)
        words = KIND_WORDS.get(part)
        picture.draw(
            "rect", x=x, y=8, width=width, height=26, kind=f"band {part}" if words else "peak"
        )
        if words and width_of(words) < width - 8:
            picture.text(x + 5, 25, words, kind=f"inside {part}")
        before += size
    if budget:
        picture.line((across(budget), 2), (across(budget), 40), "budget")
    return picture


def _curve(losses: Sequence[float]) -> Picture | None:
    every = max(1, len(losses) // _MOST_POINTS)
    points = [
        (step, loss)
        for step, loss in enumerate(losses, 1)
        if math.isfinite(loss) and step % every == 0
    ]
    if len(points) < 2:
        return None
    lowest, highest = min(loss for _, loss in points), max(loss for _, loss in points)
    picture = Picture(_WIDTH, 220, "The loss of every step")
    across = Scale(0.0, float(len(losses)), 52, _WIDTH - 10)
    up = Scale(min(lowest, highest * 0.999), highest, 220 - 44, 30)
    picture.frame(across, up, titles=("step", "loss"), ticks=(5, 4))
    path = "L".join(f"{across(step):.1f},{up(loss):.1f}" for step, loss in points)
    picture.draw("path", d=f"M{path}", kind="leading")
    return picture


def _section(title: str, rows: Rows, picture: Picture | None) -> str:
    cell = '<td style="text-align: left">{}</td>'
    lines = "".join(
        f"<tr>{''.join(cell.format(html_text(words)) for words in row)}</tr>" for row in rows
    )
    image = ""
    if picture:
        drawn = base64.b64encode(picture.document(picture_style(alone=True)).encode()).decode()
        image = f'<img alt="{html_text(picture.label)}" src="data:image/svg+xml;base64,{drawn}">'
    return (
        f"<div><p><b>{html_text(title)}</b></p><table><tbody>{lines}</tbody></table>{image}</div>"
    )


def _paragraph(*lines: str) -> str:
    text = "<br>".join(html_text(line) for line in lines if line)
    return f"<p>{text}</p>" if text else ""
