"""data_parallel: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "data_parallel",
    values=("none", "ddp", "fsdp"),
    title="Devices",
    short="{value}",
    words={
        "ddp": "each holds all weights",
        "fsdp": "weights are divided among them, gathered block by block",
    },
    of_devices=True,
    divides=True,
)
