"""lora_dropout: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "lora_dropout",
    numbers=(0.0, 1.0),
    takes="a share from 0 to below 1, or null for none",
    beside="lora_rank",
    has_row=False,
)
