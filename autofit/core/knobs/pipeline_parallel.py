"""pipeline_parallel: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "pipeline_parallel",
    numbers=(1, 1_048_577),
    takes="a whole number that divides the devices, or null",
    title="Stages",
    short="{value} stages",
    of_devices=True,
    divides=True,
    degree="pipeline",
    same_samples=True,
)
