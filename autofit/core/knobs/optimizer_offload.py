"""optimizer_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "optimizer_offload",
    off="none",
    values=("none", "cpu"),
    title="Optimizer state",
    short="optimizer offloaded",
    short_off="optimizer on the device",
    words={"cpu": "in host memory"},
    trace=Trace.UNTRACED,
    lays_out_state=True,
)
