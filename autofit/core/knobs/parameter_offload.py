"""parameter_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "parameter_offload",
    off="none",
    values=("none", "cpu"),
    title="Weights kept",
    short="weights offloaded",
    short_off="weights on the device",
    words={"cpu": "in host memory, fetched block by block"},
    trace=Trace.UNTRACED,
    quick=True,
)
