"""attention: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "attention",
    off="sdpa",
    values=("sdpa", "eager", "flash"),
    nullable=True,
    title="Attention",
    short="{value} attention",
    words={
        "sdpa": "PyTorch's fused attention",
        "eager": "plain matrix products",
        "flash": "FlashAttention",
    },
)
