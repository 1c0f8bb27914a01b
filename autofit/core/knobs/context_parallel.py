"""context_parallel: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "context_parallel",
    numbers=(1, 1_048_577),
    takes="a whole number that divides the devices of a node, or null",
    title="Tokens",
    short="tokens split in {value}",
    of_devices=True,
    divides=True,
    degree="context",
    same_samples=True,
)
