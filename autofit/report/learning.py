"""What finalists learnt in the same seconds, in sentences."""

from collections.abc import Sequence

from autofit.core.errors import pluralize
from autofit.core.learning import LearningCurve
from autofit.report.formatting import describe, knobs_that_differ


def learning_lines(curves: Sequence[LearningCurve], head: str) -> list[str]:
    """One sentence for each config, the least loss first, below one that says how they were
    trained."""
    knobs = None
    if len(curves) > 1:
        knobs = knobs_that_differ(curve.config for curve in curves)

    lines = [f"{head}: the mean loss of the last tenth of the steps, and that of each seed."]
    trained = [curve for curve in curves if curve.losses]
    trained.sort(key=lambda curve: curve.loss)
    for curve in trained:
        config = describe(curve.config, knobs)
        seeds = " and ".join(map("{:.4f}".format, curve.losses))
        loss = f"Loss {curve.loss:.4f} ({seeds})"
        steps = pluralize(max(curve.steps), "step")
        lines.append(f"{loss} after up to {steps}: {config}.")

    for curve in curves:
        if curve.reason:
            config = describe(curve.config, knobs)
            lines.append(f"Not trained to the end: {config}: {curve.reason}")

    return lines
