"""reference: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "reference",
    values=("resident", "adapter-off", "precomputed"),
    title="Reference model",
    short="{value} reference",
    words={
        "resident": "a frozen copy of the model, on the device",
        "adapter-off": "the model itself, without its adapters",
        "precomputed": "its answers are computed once, before training",
    },
    usual=("adapter-off", "precomputed", "resident", None),
    preferred=("adapter-off", "precomputed"),
    quick=True,
)
