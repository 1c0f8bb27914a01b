"""The picture of what finalists learnt: loss against seconds of training, a line for each config
and seed."""

from autofit.core.record import Record
from autofit.core.result import tier
from autofit.report.formatting import describe, knobs_that_differ
from autofit.report.html.scatter import shape
from autofit.report.html.svg import Picture, Plot, Scale, polyline


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

    plot = Plot(
        (width, 300),
        "Loss against seconds of training",
        across=Scale(0.0, max(times), 52, width - 12),
        up=Scale(min(losses) * 0.98, max(losses) * 1.02, 256, 12),
    )
    plot.frame(("seconds of training", "loss"), ticks=(width // 90, 5))

    knobs = knobs_that_differ(curve.config for curve in curves)
    for curve in curves:
        name = tier(curve.config)
        title = f"loss {curve.loss:.4f}: {describe(curve.config, knobs or None)}"
        group = plot.titled("g", title, kind=f"dot small {name}")

        kind = "learnt"
        if curve.config == record.result.config:
            kind = "learnt best"

        for run in curve.runs:
            places = [plot.at(seconds, loss) for seconds, loss in run]
            plot.path(polyline(places), kind, group)
            shape(plot, group, name, places[-1], 3.6)

    return plot
