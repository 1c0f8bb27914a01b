"""What one out-of-memory proves about other configs. Nothing here is a guess: guesses belong in `effects`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autofit.core.config import Config, Value
from autofit.search.columns import Columns, Mask

MemoryOrder = Callable[[str, Value], int | None]

ACCUMULATION = "gradient_accumulation_steps"


def rules_out(failed: Mapping[str, Value], candidate: Mapping[str, Value], memory_order: MemoryOrder) -> bool:
    """Whether `candidate` needs at least the memory of `failed`, which ran out of it.

    It does when every knob is equal or ranks at least as high by `memory_order`, and both accumulate gradients or
    neither does: without accumulation gradients may live shorter, so across that border nothing is proven. The number
    of accumulation steps itself follows from the batch sizes and takes no memory.
    """
    if (failed.get(ACCUMULATION) == 1) != (candidate.get(ACCUMULATION) == 1):
        return False
    knobs = {*failed, *candidate}
    return all(_needs_as_much(knob, failed.get(knob), candidate.get(knob), memory_order) for knob in knobs)


def ruled_out(failed: Config, candidates: Columns, memory_order: MemoryOrder) -> Mask:
    """Of many candidates at once, which ones `failed` rules out."""
    found: Mask = np.ones(len(candidates.codes), dtype=bool)
    if ACCUMULATION in candidates.values:
        found &= candidates.where(ACCUMULATION, lambda steps: (steps == 1) == (failed.get(ACCUMULATION) == 1))
    for knob in candidates.knobs:
        found &= candidates.where(knob, _AsMuch(knob, failed.get(knob), memory_order))
    return found


@dataclass(frozen=True)
class _AsMuch:
    """Whether a value needs at least the memory of another."""

    knob: str
    failed: Value
    memory_order: MemoryOrder

    def __call__(self, value: Value) -> bool:
        return _needs_as_much(self.knob, self.failed, value, self.memory_order)


def _needs_as_much(knob: str, failed: Value, candidate: Value, memory_order: MemoryOrder) -> bool:
    if knob == ACCUMULATION or failed == candidate:
        return True
    low, high = memory_order(knob, failed), memory_order(knob, candidate)
    return low is not None and high is not None and high >= low
