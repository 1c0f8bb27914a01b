"""gradient_accumulation_steps: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "gradient_accumulation_steps",
    numbers=(1, 1_048_577),  # the largest effective batch
    takes="a whole number, or null for what the micro-batch leaves",
    derived=True,
    follows=True,
    part_of="micro_batch_size",
    has_row=False,
    trace=Trace.SCALED,
)
