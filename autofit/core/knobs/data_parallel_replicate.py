"""data_parallel_replicate: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "data_parallel_replicate",
    numbers=(1, 1_048_577),
    takes="a whole number that divides the number of devices, or null",
    title="Replicas",
    short="{value} replicas",
    of_devices=True,
    divides=True,
    degree="replicate",
    follows=True,
)
