"""reference: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "reference",
    values=("resident", "offloaded", "adapter-off", "precomputed"),
    title="Reference model",
    short="{value} reference",
    words={
        "resident": "a frozen copy of the model, on the device",
        "offloaded": "a frozen copy of the model, whose blocks rest in host memory",
        "adapter-off": "the model itself, without its adapters",
        "precomputed": "its answers are computed once, before training",
    },
    usual=("adapter-off", "precomputed", "resident", None),
    preferred=("adapter-off", "precomputed"),
    quick=True,
    same_trace={"offloaded": "resident"},  # but for what rests on the host
)

OFFLOADED = "offloaded"
COPIED = ("resident", OFFLOADED)  # where a copy of the model is made
