"""optimizer: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

# They keep small updates of bf16 weights, which others round away.
KEEP_SMALL_UPDATES = ("adamw-master", "adamw-sr", "adamw-8bit-sr")
UNDER_8_BITS = ("adamw-4bit",)  # of state
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
    fidelity={
        # These three are for bf16 weights alone, of which the others lose small updates.
        "adamw-master": 8,
        "adamw-sr": 7,
        "adamw-8bit-sr": 6,
        "adamw": 5,
        "adamw-foreach": 5,
        "paged-adamw": 5,
        "muon": 4,  # the directions of matrices, not their sizes
        "adamw-8bit": 4,  # a code book made for the values of moments
        "paged-adamw-8bit": 4,
        "adamw-fp8": 3,  # three bits of mantissa
        "adamw-4bit": 2,
        "adafactor": 1,  # no first moment, and the second as a product of rows and columns
        "lion-8bit": 1,  # one moment, and only the sign of what it says
        "sgd": 0,
    },
    fidelity_order=3,
    losses={
        "adamw-8bit": 1,
        "paged-adamw-8bit": 1,
        "adamw-8bit-sr": 1,
        "adamw-fp8": 1,
        "lion-8bit": 1,
        "adamw-4bit": 2,
    },
    relatives={
        "adamw-foreach": "adamw",
        "adamw-8bit": "adamw",
        "adamw-4bit": "adamw",
        "adamw-fp8": "adamw",
        "paged-adamw-8bit": "adamw",
        "paged-adamw": "adamw",
        "adamw-master": "adamw",
        "adamw-sr": "adamw",
        "adamw-8bit-sr": "adamw",
    },
    trace=Trace.UNTRACED,
    traced_as="sgd",
    quick=True,
    # sgd has no state. 8-bit is not ordered: it stores small tensors' state in fp32, which is more than
    # the bf16 state of adamw beside bf16 weights. Nor is foreach: it adds temporaries, but keeps its step
    # counters on the host, where fused adamw has one per tensor on the device. Adafactor's temporary is
    # as large as the largest weight, and torchao's takes 24 bytes per element of it where a tracker
    # forbids compilation.
    memory_order={"sgd": 0, "adamw": 1},
    lays_out_state=True,
)
