"""compile: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "compile",
    off="none",
    values=("none", "default", "max-autotune-no-cudagraphs"),
    title="Compiler",
    short="compiled {value}",
    short_off="no compilation",
    words={
        "default": "blocks are compiled (torch.compile)",
        "max-autotune-no-cudagraphs": "blocks are compiled and their kernels tuned",
    },
    trace=Trace.UNTRACED,
    quick=True,
)
