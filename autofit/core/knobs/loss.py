"""loss: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "loss",
    off="standard",
    values=("standard", "chunked", "fused"),
    title="Loss",
    short="{value} loss",
    short_off="standard loss",
    words={
        "standard": "over all logits at once",
        "chunked": "in chunks, never holding all logits",
        "fused": "in one kernel, never holding all logits",
    },
    preferred=("chunked", "standard"),
    quick=True,
    of_head=True,
)
