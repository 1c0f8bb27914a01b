"""lora_targets: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "lora_targets",
    values=("attention", "all-linear", "all-linear+head"),
    pattern=r"(all-linear|[\w.]+)(\+(all-linear|[\w.]+))*",
    takes="attention, all-linear, all-linear+head, or names of layers joined by + (q_proj+v_proj, attention+experts)",
    fidelity_order=5,
    beside="lora_rank",
    part_of="lora_rank",
    has_row=False,
    usual=(None, "all-linear"),
)
