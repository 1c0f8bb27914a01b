"""lora_alpha: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "lora_alpha",
    numbers=(5e-324, 1e308),
    takes="a number above 0, or null for twice the rank",
    beside="lora_rank",
    has_row=False,
    follows=True,
    trace=Trace.SCALED,
)
