"""What one out-of-memory proves about other configs. Nothing here is a guess: guesses belong in `effects`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from autofit.core.config import Value
from autofit.search.encoding import Columns, Mask

MemoryOrder = Callable[[str, Value], int | None]

ACCUMULATION = "gradient_accumulation_steps"


def rules_out(failed: Mapping[str, Value], candidate: Mapping[str, Value], memory_order: MemoryOrder) -> bool:
    """Whether `candidate` needs at least the memory of `failed`, which ran out of it.

    It does when every knob is equal or ranks at least as high by `memory_order`, and both accumulate gradients or
    neither does: without accumulation gradients may live shorter, so across that border nothing is proven. The number
    of accumulation steps itself follows from the batch sizes and takes no memory.
    """
    return bool(ruled_out(failed, Columns([candidate]), memory_order)[0])


def ruled_out(failed: Mapping[str, Value], candidates: Columns, memory_order: MemoryOrder) -> Mask:
    """The same of many candidates at once."""
    found = candidates.where(ACCUMULATION, lambda steps: (steps == 1) == (failed.get(ACCUMULATION) == 1))
    for knob in {*failed, *candidates.knobs}:
        needs = functools.partial(_needs_as_much, knob, failed.get(knob), memory_order=memory_order)
        found &= candidates.where(knob, needs)
    return found


def _needs_as_much(knob: str, failed: Value, candidate: Value, memory_order: MemoryOrder) -> bool:
    if knob == ACCUMULATION or failed == candidate:
        return True
    low, high = memory_order(knob, failed), memory_order(knob, candidate)
    return low is not None and high is not None and high >= low
