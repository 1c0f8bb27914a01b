"""lora_plus: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "lora_plus",
    numbers=(1.0, 1000000.0),
    takes="a number from 1, or null for the same learning rate",
    beside="lora_rank",
    has_row=False,
    trace=Trace.UNTRACED,
)
