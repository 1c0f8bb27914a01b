"""The picture of what finalists learnt: loss against seconds of training, a line for each config and seed."""

from autofit.core.record import Record
from autofit.core.result import tier
from autofit.report.formatting import describe, knobs_that_differ
from autofit.report.html.scatter import shape
from autofit.report.html.svg import Picture, Scale


def learning_picture(record: Record, width: int = 720) -> Picture | None:
    """Loss against seconds; the best config's lines are drawn thick. None where nothing was judged."""
    curves = [each for each in record.result.learning if each.losses]
    points = [point for curve in curves for run in curve.runs for point in run]
    if not points:
        return None
    best, knobs = record.result.config, knobs_that_differ(curve.config for curve in curves)
    picture = Picture(width, 300, "Loss against seconds of training")
    losses = [loss for _, loss in points]
    across = Scale(0.0, max(seconds for seconds, _ in points), 52, width - 12)
    up = Scale(min(losses) * 0.98, max(losses) * 1.02, 256, 12)
    picture.frame(across, up, titles=("seconds of training", "loss"), ticks=(width // 90, 5))
    for curve in curves:
        name = tier(curve.config)
        group = picture.draw("g", kind=f"dot small {name}")
        picture.draw(
            "title", f"loss {curve.loss:.4f}: {describe(curve.config, knobs or None)}", into=group
        )
        for run in curve.runs:
            path = "M" + "L".join(f"{across(seconds):.1f},{up(loss):.1f}" for seconds, loss in run)
            picture.draw(
                "path", into=group, d=path, kind="learnt best" if curve.config == best else "learnt"
            )
            shape(picture, group, name, (across(run[-1][0]), up(run[-1][1])), 3.6)
    return picture
