"""tensor_parallel: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "tensor_parallel",
    numbers=(1, 1_048_577),
    takes="a whole number that divides the devices of a node, or null",
    title="Layers",
    short="layers split in {value}",
    of_devices=True,
    divides=True,
    degree="tensor",
    same_samples=True,
)
