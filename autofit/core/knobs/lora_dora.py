"""lora_dora: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "lora_dora",
    off=False,
    values=(False, True),
    title="Adapters",
    short="DoRA",
    short_off="plain LoRA",
    words={True: "with the lengths of rows (DoRA)"},
    beside="lora_rank",
)
