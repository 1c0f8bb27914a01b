"""activation_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "activation_offload",
    off="none",
    values=("none", "cpu"),
    pattern=r"cpu:\d+",
    takes="none, cpu, or cpu:N for what the first N blocks save",
    title="Activations",
    short="activations offloaded",
    short_off="activations on the device",
    words={"cpu": "wait for the backward in host memory"},
    of_blocks="of the first {} alone",
    trace=Trace.UNTRACED,
)
