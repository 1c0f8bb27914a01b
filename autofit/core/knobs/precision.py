"""precision: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Value

COMPUTES_IN_FP32 = ("fp32", "tf32")  # their losses agree to about 1e-3, whatever computes them
BF16_WEIGHTS = ("bf16", "fp8")  # all of them, those that are trained, too
# They take the same memory and work, but for how fast their products are.
_RELATIVES: dict[Value, Value] = {"tf32": "fp32", "fp16-mixed": "bf16-mixed"}

KNOB = Knob(
    "precision",
    off="fp32",
    values=("fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed", "fp8"),
    title="Numbers",
    short="{value}",
    words={
        "fp32": "32-bit floats throughout",
        "tf32": "32-bit floats, matrix products in TF32",
        "bf16": "bfloat16 throughout: weights, gradients and optimizer state",
        "bf16-mixed": "trained weights in 32 bits, computing in bfloat16 (autocast)",
        "fp16-mixed": "trained weights in 32 bits, computing in float16 with a loss scaler",
        "fp8": "bfloat16 weights, matrix products in 8-bit floats",
    },
    fidelity={"fp32": 5, "tf32": 4, "bf16-mixed": 3, "fp16-mixed": 2, "bf16": 1, "fp8": 0},
    fidelity_order=2,
    losses={"fp8": 1},
    same_trace=_RELATIVES,
    relatives=_RELATIVES,
    preferred=("bf16", "bf16-mixed", "fp16-mixed", "fp32"),
    quick=True,
)
