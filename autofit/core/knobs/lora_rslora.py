"""lora_rslora: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "lora_rslora",
    off=False,
    values=(False, True),
    title="Scale",
    short="rsLoRA",
    short_off="plain scale",
    words={True: "alpha / sqrt(rank) (rsLoRA)"},
    beside="lora_rank",
    trace=Trace.UNTRACED,
)
