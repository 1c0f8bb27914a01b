"""head_only: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "head_only",
    off=False,
    values=(False, True),
    title="Trained",
    short="head alone",
    short_off="all weights trained",
    words={True: "the output layer alone"},
)
