"""pipeline_schedule: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "pipeline_schedule",
    values=("1f1b", "gpipe", "interleaved"),
    nullable=True,
    title="Schedule",
    short="{value}",
    words={
        "1f1b": "a stage alternates forwards and backwards of micro-batches",
        "gpipe": "a stage does all forwards of a batch before its backwards",
        "interleaved": "a stage holds two rows of blocks, so that others wait half as long for it",
    },
    of_devices=True,
    beside="pipeline_parallel",
)
