"""Pruning: what one out-of-memory proves about other configs. Proofs only; the surrogate guesses."""

import functools
from collections.abc import Callable, Mapping

from autofit.core.config import Value
from autofit.search.encoding import Encoding, Mask

MemoryOrder = Callable[[str, Value], int | None]
ACCUMULATION = "gradient_accumulation_steps"


def ruled_out(failed: Mapping[str, Value], candidates: Encoding, memory_order: MemoryOrder) -> Mask:
    """Which of many candidates need at least the memory of `failed`, which ran out of memory. One does when every knob
    is equal or ranks at least as high by `memory_order`, and both accumulate gradients or neither does: without
    accumulation gradients may live shorter, so nothing is proven across that border. The number of accumulation steps
    follows from the batch sizes and takes no memory."""
    pruned = candidates.where(ACCUMULATION, lambda steps: (steps == 1) == (failed.get(ACCUMULATION) == 1))
    for knob in {*failed, *candidates.knobs}:
        needs = functools.partial(_needs_as_much, knob, failed.get(knob), memory_order=memory_order)
        pruned &= candidates.where(knob, needs)
    return pruned


def _needs_as_much(knob: str, failed: Value, candidate: Value, memory_order: MemoryOrder) -> bool:
    if knob == ACCUMULATION or failed == candidate:
        return True
    low, high = memory_order(knob, failed), memory_order(knob, candidate)
    return low is not None and high is not None and high >= low
