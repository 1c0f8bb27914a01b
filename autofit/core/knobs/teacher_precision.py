"""teacher_precision: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "teacher_precision",
    off="none",
    values=("none", "int8", "nf4"),
    title="Teacher",
    short="{value} teacher",
    short_off="unquantised teacher",
    words={"int8": "its weights in 8 bits", "nf4": "its weights in 4 bits (NF4)"},
    fidelity={"none": 2, "int8": 1, "nf4": 0},
    losses={"int8": 1, "nf4": 1},
    usual=("none", "nf4"),
    saves_memory=True,
)
