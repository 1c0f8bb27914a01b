"""activation_checkpointing: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob
from autofit.core.some_blocks import SomeBlocks

BUDGET = "budget-"  # how the values begin that leave to the compiler what is recomputed
_VALUES = ("none", "selective", "alternate", "full", "budget-0.25", "budget-0.5", "budget-0.75")

KNOB = Knob(
    "activation_checkpointing",
    off="none",
    values=_VALUES,
    pattern=r"full:\d+(\+selective)?",
    takes=f"{', '.join(_VALUES)}, full:N for the first N blocks, or full:N+selective",
    title="Checkpointing",
    short="checkpointing {value}",
    short_off="no checkpointing",
    words={
        "full": "every block is computed again in the backward",
        "alternate": "every second block is computed again in the backward",
        "selective": "all but matrix products and attention is computed again in the backward",
    },
    of_blocks="of the first {} alone",
    usual=("none", "full"),
    saves_memory=True,
    # Shown for the networks of the tests, not for all: a block whose forward temporarily needs more than
    # all other blocks save would need that memory again beside the gradients. So `alternate` has no order:
    # of two blocks it recomputes the first, where `full` recomputes both (a Llama with tied embeddings in
    # bf16: 0.3 % less).
    memory_order={"full": 0, "none": 1},
)


def checkpoints_blocks(value: object) -> bool:
    """Whether a value has blocks computed again that the model's own code could mark: not by a
    compiler's budget."""
    return value != KNOB.off and not str(value).startswith(BUDGET)


def ways_of_blocks(value: str, number: int) -> list[str]:
    """How each of so many blocks is checkpointed: one of the values that are for all blocks."""
    if value == "alternate":
        # Never the last: it would be recomputed at once, while all that the others save is still
        # there.
        return ["none" if after % 2 == 0 else "full" for after in reversed(range(number))]
    some = SomeBlocks.of(value)
    if some is None:
        return [value] * number
    first = min(some.number, number)
    return [some.value] * first + [some.rest] * (number - first)
