"""What finalists learnt in the same seconds, in sentences."""

from collections.abc import Sequence

from autofit.core.errors import pluralize
from autofit.core.learning import LearningCurve
from autofit.report.formatting import describe, knobs_that_differ


def learning_lines(curves: Sequence[LearningCurve], head: str) -> list[str]:
    """One sentence for each config, the least loss first, below one that says how they were trained."""
    knobs = knobs_that_differ(curve.config for curve in curves) if len(curves) > 1 else None
    lines = [f"{head}: the mean loss of the last tenth of the steps, and that of each seed."]
    for curve in sorted((each for each in curves if each.losses), key=lambda each: each.loss):
        seeds = " and ".join(f"{loss:.4f}" for loss in curve.losses)
        steps = pluralize(max(curve.steps), "step")
        lines.append(
            f"Loss {curve.loss:.4f} ({seeds}) after up to {steps}: {describe(curve.config, knobs)}."
        )
    failed = (each for each in curves if each.reason)
    return [
        *lines,
        *(
            f"Not trained to the end: {describe(each.config, knobs)}: {each.reason}"
            for each in failed
        ),
    ]
