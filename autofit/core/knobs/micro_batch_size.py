"""micro_batch_size: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace

KNOB = Knob(
    "micro_batch_size",
    numbers=(1, 1_048_577),  # the largest effective batch
    takes="a whole number that divides the effective batch, or null for the whole of it",
    title="Micro-batch",
    short="micro-batch {value}x{gradient_accumulation_steps}",
    trace=Trace.SCALED,
)
