"""lora_targets: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Value

# Each set of layers contains the one before.
SETS: dict[Value, int] = {"attention": 0, "all-linear": 1, "all-linear+head": 2}

KNOB = Knob(
    "lora_targets",
    values=tuple(SETS),
    pattern=r"(all-linear|[\w.]+)(\+(all-linear|[\w.]+))*",
    takes="attention, all-linear, all-linear+head, or names of layers joined by + (q_proj+v_proj, attention+experts)",
    fidelity=SETS,
    fidelity_order=5,
    beside="lora_rank",
    part_of="lora_rank",
    has_row=False,
    memory_order=SETS,
    usual=(None, "all-linear"),
)
