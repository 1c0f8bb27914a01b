"""kernels: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "kernels",
    off="none",
    values=("none", "liger"),
    title="Kernels",
    short="{value} kernels",
    short_off="PyTorch's kernels",
    words={"liger": "Liger's"},
    quick=True,
)
