"""What a notebook shows of a result, an estimate and a training: a small table and a picture, as HTML of its own.

Pictures are images, so that their style stays theirs and the page's stays the notebook's.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from autofit.core.estimate import PARTS, Estimate
from autofit.core.measurement import Measurement
from autofit.core.notebook import as_html
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import summary
from autofit.report.foretold import answer_line, foretold_lines, foretold_of
from autofit.report.formatting import describe, gib, number, percent, where
from autofit.report.html.knob_names import config_rows
from autofit.report.html.memory import KIND_WORDS
from autofit.report.html.page import picture_style
from autofit.report.html.scatter import scatter
from autofit.report.html.summary import memory_bar, speed_words
from autofit.report.html.svg import Picture, Scale, width_of
from autofit.report.nothing_fits import nothing_fits_lines

_WIDTH = 480
_VERDICTS = {"yes": "fits", "maybe": "may fit", "no": "does not fit"}
_MOST_POINTS = 400  # of a curve

Rows = Iterable[tuple[str, str]]


class Step(Protocol):
    """What is told of a step of a training."""

    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def seconds(self) -> float: ...


@as_html.register
def result_html(result: Result) -> str:
    """The best config in words, how fast it is in how much memory, and every config that was measured."""
    if result.predicted_best is not None:
        return foretold_html(result, result.predicted_best)
    if result.best is None:
        return _paragraph(*nothing_fits_lines(result))
    title = f"The best config for {result.model} on {where(result.hardware, result.budget)}"
    rows = [*_figures(result.best, result), *_config(result.best.config)]
    return _shown(title, rows, scatter(Record(result), _WIDTH)) + _paragraph(*summary(result))


def foretold_html(result: Result, found: Estimate) -> str:
    """What is predicted where nothing could be measured."""
    head = f"Nothing was measured. Predicted: {answer_line(result, found)}"
    return _paragraph(head) + estimate_html(found) + _paragraph(*foretold_lines(result, found), *foretold_of(result))


@as_html.register
def estimate_html(estimate: Estimate) -> str:
    """Whether it fits, what the memory consists of, and where the time goes."""
    low, high, budget = gib(estimate.low), gib(estimate.high), estimate.budget
    expected = f"{low} GiB" if low == high else f"{low} to {high} GiB"
    verdict = f", {_VERDICTS[estimate.fits(budget)]} {gib(budget.device_bytes)} GiB" if budget else ""
    rows = [("Memory", f"{expected}{verdict}")]
    rows += [(f"- {KIND_WORDS.get(part, part)}", f"{gib(estimate.breakdown[part])} GiB") for part in _parts(estimate)]
    if estimate.step_seconds is not None:
        bound = f", bound by {estimate.bottleneck}" if estimate.bottleneck else ""
        use = f", {percent(estimate.utilisation)} of the peak rate put to use" if estimate.utilisation else ""
        rows += [("Speed", _rate(estimate)), ("Step", f"{estimate.step_seconds:.3g} s{bound}{use}")]
    return _shown(f"Predicted: {describe(estimate.config)}", rows, _stack(estimate)) + _paragraph(*estimate.notes)


def trained_html(history: Sequence[Step], evaluations: Sequence[float], config: Mapping[str, Any] | None) -> str:
    """How far training came, how fast, and the loss of every step."""
    seconds = sum(each.seconds for each in history)
    samples = sum(each.samples for each in history)
    rows = [("Steps", f"{len(history):,} ({samples:,} samples)")]
    if history:
        rows.append(("Loss", f"{history[0].loss:.4g} at first, {history[-1].loss:.4g} at last"))
    if evaluations:
        rows.append(("Evaluation", ", ".join(f"{loss:.4g}" for loss in evaluations[-5:])))
    if seconds:
        rows.append(("Speed", f"{number(samples / seconds)} samples/s"))
    return _shown("Trained", [*rows, *_config(config or {})], _curve([each.loss for each in history]))


def _figures(best: Measurement, result: Result) -> Rows:
    speed, bar = speed_words(best), memory_bar(best, result)
    proof = "verified in longer runs" if best.verified else "not verified"
    yield "Speed", f"{speed['rate']} {speed['unit']}, {proof}"
    if speed["step"]:
        yield "Step", speed["step"]
    if bar:
        yield "Memory", bar.label


def _config(config: Mapping[str, Any]) -> Rows:
    return ((row.title, row.words) for row in config_rows(config))


def _rate(estimate: Estimate) -> str:
    rates = {"tokens/s": estimate.tokens_per_second, "samples/s": estimate.samples_per_second}
    return ", ".join(f"{number(rate)} {unit}" for unit, rate in rates.items() if rate)


def _parts(estimate: Estimate) -> list[str]:
    return [part for part in PARTS if estimate.breakdown.get(part)]


def _stack(estimate: Estimate) -> Picture | None:
    """What the peak consists of, as one bar; what a budget leaves is a line."""
    parts = _parts(estimate)
    if not parts:
        return None
    picture = Picture(_WIDTH, 44, "What the peak memory consists of")
    budget = estimate.budget.device_bytes if estimate.budget else 0
    across = Scale(0.0, max(budget, sum(estimate.breakdown.values())) * 1.02, 2, _WIDTH - 2)
    before = 0
    for part in parts:
        size = estimate.breakdown[part]
        width = max(across(size) - across(0) - 0.8, 0.5)
        kind = "peak" if part not in KIND_WORDS else f"band {part}"
        picture.draw("rect", x=across(before), y=8, width=width, height=26, kind=kind)
        words = KIND_WORDS.get(part, part)
        if width_of(words) < width - 8 and part in KIND_WORDS:
            picture.text(across(before) + 5, 25, words, kind=f"inside {part}")
        before += size
    if budget:
        picture.line((across(budget), 2), (across(budget), 40), "budget")
    return picture


def _curve(losses: Sequence[float]) -> Picture | None:
    every = max(1, len(losses) // _MOST_POINTS)
    points = [(step, loss) for step, loss in enumerate(losses, 1) if math.isfinite(loss) and step % every == 0]
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


def _shown(title: str, rows: Rows, picture: Picture | None) -> str:
    cell = '<td style="text-align: left">{}</td>'
    lines = "".join(f"<tr>{''.join(cell.format(escape(each)) for each in row)}</tr>" for row in rows)
    table = f"<p><b>{escape(title)}</b></p><table><tbody>{lines}</tbody></table>"
    return f"<div>{table}{_image(picture) if picture else ''}</div>"


def _paragraph(*lines: str) -> str:
    told = "<br>".join(escape(line) for line in lines if line)
    return f"<p>{told}</p>" if told else ""


def _image(picture: Picture) -> str:
    drawn = base64.b64encode(picture.document(picture_style(alone=True)).encode()).decode()
    return f'<img alt="{escape(picture.label)}" src="data:image/svg+xml;base64,{drawn}">'
