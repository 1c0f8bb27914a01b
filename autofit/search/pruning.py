"""Pruning: what one out-of-memory proves about other configs. The surrogate guesses, not this."""

import functools
from collections.abc import Callable, Mapping

from autofit.core.config import Value
from autofit.search.encoding import Encoding, Mask

MemoryOrder = Callable[[str, Value], int | None]
ACCUMULATION = "gradient_accumulation_steps"


def ruled_out(
    failed: Mapping[str, Value],
    pool: Encoding,
    memory_order: MemoryOrder,
) -> Mask:
    """Which configs of a pool need at least the memory of `failed`, which ran out of memory.

    One does when every knob is equal or ranks at least as high by `memory_order`, and both
    accumulate gradients or neither does: without accumulation gradients may live shorter, so
    nothing is proven across that border. The number of accumulation steps follows from the batch
    sizes and takes no memory.
    """
    accumulates = failed.get(ACCUMULATION) != 1
    pruned = pool.where(ACCUMULATION, lambda steps: (steps != 1) == accumulates)
    for knob in {*failed, *pool.knobs} - {ACCUMULATION}:
        needs = functools.partial(_needs_as_much, knob, failed.get(knob), memory_order)
        pruned &= pool.where(knob, needs)

    return pruned


def _needs_as_much(
    knob: str,
    failed: Value,
    memory_order: MemoryOrder,
    candidate: Value,
) -> bool:
    if failed == candidate:
        return True

    low = memory_order(knob, failed)
    high = memory_order(knob, candidate)
    return low is not None and high is not None and high >= low
