"""The picture of what finalists learnt: loss against seconds of training, a line for each config
and seed."""

from autofit.core.record import Record
from autofit.core.result import tier
from autofit.report.formatting import describe, knobs_that_differ
from autofit.report.html.scatter import shape
from autofit.report.html.svg import Picture, Scale, polyline


def learning_picture(record: Record, width: int = 720) -> Picture | None:
    """Loss against seconds; the best config's lines are drawn thick.

    None where nothing was judged.
    """
    curves = [curve for curve in record.result.learning if curve.losses]
    times = []
    losses = []
    for curve in curves:
        for run in curve.runs:
            for seconds, loss in run:
                times.append(seconds)
                losses.append(loss)

    if not losses:
        return None

    across = Scale(0.0, max(times), 52, width - 12)
    up = Scale(min(losses) * 0.98, max(losses) * 1.02, 256, 12)
    picture = Picture(width, 300, "Loss against seconds of training")
    picture.frame(across, up, titles=("seconds of training", "loss"), ticks=(width // 90, 5))

    knobs = knobs_that_differ(curve.config for curve in curves)
    for curve in curves:
        name = tier(curve.config)
        title = f"loss {curve.loss:.4f}: {describe(curve.config, knobs or None)}"
        group = picture.titled("g", title, kind=f"dot small {name}")
        kind = "learnt best" if curve.config == record.result.config else "learnt"

        for run in curve.runs:
            places = [(across(seconds), up(loss)) for seconds, loss in run]
            picture.draw("path", into=group, d=polyline(places), kind=kind)
            shape(picture, group, name, places[-1], 3.6)

    return picture
