"""quantization: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "quantization",
    off="none",
    values=("none", "int8", "nf4", "nf4-dq"),
    title="Frozen weights",
    short="{value} weights",
    short_off="unquantised weights",
    words={
        "int8": "in 8 bits",
        "nf4": "in 4 bits (NF4)",
        "nf4-dq": "in 4 bits (NF4, double quantised)",
    },
    fidelity={"none": 3, "int8": 2, "nf4": 1, "nf4-dq": 0},
    fidelity_order=1,
    losses={"nf4-dq": 1},  # of scales, beside nf4
    same_work={"nf4-dq": "nf4"},
    usual=("none", "nf4-dq"),
    saves_memory=True,
)
