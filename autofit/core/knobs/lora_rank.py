"""lora_rank: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "lora_rank",
    off=0,
    numbers=(0, 1025),
    takes="a whole number from 0 (train all weights) to 1024",
    title="Trained",
    short="LoRA {value} {lora_targets}",
    short_off="no LoRA",
    words={0: "all weights"},
    fidelity_order=4,
    trace=Trace.SCALED,
    sizes_alike=True,
)
