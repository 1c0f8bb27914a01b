"""optimizer_in_backward: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "optimizer_in_backward",
    off=False,
    values=(False, True),
    title="Update",
    short="update in the backward",
    short_off="update after the backward",
    words={True: "each weight as soon as its gradient is there"},
    trace=Trace.UNTRACED,
    lays_out_state=True,
)
