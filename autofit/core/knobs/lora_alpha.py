"""lora_alpha: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

# Where none is set, whatever the rank: updates are scaled by alpha / rank, and with one alpha the
# same learning rate suits all ranks ("LoRA without regret").
USUAL_ALPHA = 32

KNOB = Knob(
    "lora_alpha",
    numbers=(5e-324, 1e308),
    takes="a number above 0, or null for 32",
    beside="lora_rank",
    has_row=False,
    follows=True,
    trace=Trace.SCALED,
)
