"""optimizer: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

# They keep small updates of bf16 weights, which others round away.
KEEP_SMALL_UPDATES = ("adamw-master", "adamw-sr", "adamw-8bit-sr")
COMPILED = ("adamw-4bit", "adamw-fp8", "adamw-sr", "adamw-8bit-sr")  # torchao compiles their step

KNOB = Knob(
    "optimizer",
    off="adamw",
    values=(
        "adamw",
        "adamw-foreach",
        "adamw-8bit",
        "adamw-4bit",
        "adamw-fp8",
        "paged-adamw-8bit",
        "paged-adamw",
        "adamw-master",
        "adamw-sr",
        "adamw-8bit-sr",
        "lion-8bit",
        "muon",
        "adafactor",
        "sgd",
    ),
    nullable=True,
    title="Optimizer",
    short="{value}",
    words={
        "adamw": "AdamW",
        "adamw-foreach": "AdamW, many tensors at a time",
        "adamw-8bit": "AdamW with its state in 8 bits",
        "adamw-4bit": "AdamW with its state in 4 bits",
        "adamw-fp8": "AdamW with its state in 8-bit floats",
        "paged-adamw-8bit": "AdamW with its state in 8 bits, paged to host memory",
        "paged-adamw": "AdamW with its state paged to host memory",
        "adamw-master": "AdamW on 32-bit copies of the weights",
        "adamw-sr": "AdamW that rounds its weights stochastically",
        "adamw-8bit-sr": "AdamW with its state in 8 bits that rounds its weights stochastically",
        "lion-8bit": "Lion with its state in 8 bits",
        "muon": "Muon for matrices of blocks, AdamW for all else",
        "adafactor": "Adafactor",
        "sgd": "SGD",
    },
    fidelity_order=3,
    trace=Trace.UNTRACED,
    traced_as="sgd",
    quick=True,
    lays_out_state=True,
)
