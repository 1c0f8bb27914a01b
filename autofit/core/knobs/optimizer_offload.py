"""optimizer_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "optimizer_offload",
    off="none",
    values=("none", "cpu"),
    pattern=r"cpu:\d+",
    takes="none, cpu, or cpu:N for the weights of the first N blocks",
    title="Optimizer state",
    short="optimizer offloaded",
    short_off="optimizer on the device",
    words={"cpu": "in host memory"},
    of_blocks="of the first {} alone",
    trace=Trace.UNTRACED,
    lays_out_state=True,
)
