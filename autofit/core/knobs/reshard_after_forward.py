"""reshard_after_forward: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "reshard_after_forward",
    values=(True, False),
    numbers=(2, 1_048_577),
    takes="true, false, or the size of the groups that share weights between forward and backward",
    title="Gathered weights",
    short="reshard {value}",
    short_off="no resharding",
    words={
        True: "are given up after the forward",
        False: "are kept from the forward to the backward",
    },
    of_devices=True,
    divides=True,
    usual=(True, False, None),
)
