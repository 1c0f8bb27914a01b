"""activation_checkpointing: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

BUDGET = "budget-"  # how the values begin that leave to the compiler what is recomputed

KNOB = Knob(
    "activation_checkpointing",
    off="none",
    values=("none", "selective", "alternate", "full", "budget-0.25", "budget-0.5", "budget-0.75"),
    title="Checkpointing",
    short="checkpointing {value}",
    short_off="no checkpointing",
    words={
        "full": "every block is computed again in the backward",
        "alternate": "every second block is computed again in the backward",
        "selective": "all but matrix products and attention is computed again in the backward",
    },
    usual=("none", "full"),
    saves_memory=True,
    # Shown for the networks of the tests, not for all: a block whose forward temporarily needs more than
    # all other blocks save would need that memory again beside the gradients. So `alternate` has no order:
    # of two blocks it recomputes the first, where `full` recomputes both (a Llama with tied embeddings in
    # bf16: 0.3 % less).
    memory_order={"full": 0, "none": 1},
)
