"""The timeline of a step put together from a shallow trace: all blocks, any micro-batch, any rank, with or without
accumulated gradients.

A trace is cut where blocks begin. Each piece has what it leaves behind and the most it held meanwhile, both counted from
its start; pieces of the middle blocks follow one another as often as the model has such blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autofit.core.hardware import Hardware
from autofit.estimate.memory import ROUNDING
from autofit.estimate.scaling import Floats, Grid, Ints, Symbols
from autofit.estimate.trace import Trace

_KEPT = ("parameters", "optimizer")


@dataclass(frozen=True)
class Piece:
    """Events and operators from one mark to the next; `repeats` is given to the first piece of a repeated run."""

    events: slice
    costs: slice
    phase: str
    block: int | None


@dataclass(frozen=True)
class StepMemory:
    """Bytes at each pair of the grid; what each part takes, and the most that activations and temporaries take.

    Attributes:
        parameters, gradients, inputs: bytes.
        highest: of all but parameters and optimizer state, in forward and backward; gradients that this step makes
            included as they come.
        highest_accumulating: the same where gradients are added to those that are there: these not included.
        left: what is alive beside them when the update begins.
    """

    parameters: Floats
    gradients: Floats
    highest: Floats
    highest_accumulating: Floats
    left: Floats


def pieces(trace: Trace) -> list[Piece]:
    """The pieces of forward and backward, in order."""
    found = []
    for mark, after in zip(trace.marks, trace.marks[1:], strict=False):
        if mark.phase in ("forward", "backward"):
            found.append(
                Piece(slice(mark.events, after.events), slice(mark.costs, after.costs), mark.phase, mark.block)
            )
    return found


def unrolled(trace: Trace) -> Iterator[tuple[list[Piece], int]]:
    """Runs of pieces in order, and how often each run follows itself."""
    depth = trace.depth
    run: list[Piece] = []
    inside = False
    for piece in pieces(trace):
        if depth is not None and piece.block is not None:
            now = piece.block in depth.standing_for
            if now != inside:
                if run:
                    yield run, depth.repeats if inside else 1
                run, inside = [], now
        elif (
            depth is not None
            and piece.phase == "backward"
            and inside
            and piece.block is None
            and run[-1].phase == "forward"
        ):
            yield run, depth.repeats
            run, inside = [], False
        run.append(piece)
    yield run, depth.repeats if inside and depth is not None else 1


def step_memory(trace: Trace, hardware: Hardware, grid: Grid, symbols: Symbols) -> StepMemory:
    """Put the memory of a step together."""
    sizes = grid.amounts((event.nbytes for event in trace.events), symbols)
    if hardware.device == "cuda":
        sizes = np.ceil(sizes / ROUNDING) * ROUNDING
    storages = np.fromiter((event.storage for event in trace.events), dtype=np.int64)
    changes = _for_all_blocks(trace, _changes(sizes, storages), storages)
    labels = [trace.labels.get(int(storage)) for storage in storages]
    kept = np.array([label in _KEPT for label in labels])
    gradient = np.array([label == "gradients" for label in labels])
    start = next(mark.events for mark in trace.marks if mark.phase == "forward")
    end = next(mark.events for mark in trace.marks if mark.phase == "update")
    others = np.where(kept[:, None], 0.0, changes)
    before = others[:start].sum(0)
    highest, left = _run_through(trace, others, before)
    accumulating = _freed_when_complete(trace, others, storages, gradient)
    highest_accumulating, _ = _run_through(trace, accumulating, before)
    last = {int(storage): place for place, storage in enumerate(storages[:end])}
    return StepMemory(
        parameters=_total(trace, sizes, last, "parameters"),
        gradients=_total(trace, sizes, last, "gradients"),
        highest=highest,
        highest_accumulating=highest_accumulating,
        left=left - _total(trace, sizes, last, "gradients"),
    )


def _changes(sizes: Floats, storages: Ints) -> Floats:
    """What each event adds to the live bytes."""
    changes = sizes.copy()
    latest: dict[int, int] = {}
    for place, storage in enumerate(storages.tolist()):
        if storage in latest:
            changes[place] -= sizes[latest[storage]]
        latest[storage] = place
    return changes


def _for_all_blocks(trace: Trace, changes: Floats, storages: Ints) -> Floats:
    """What blocks in the middle have made and what is let go later at once, as the low copies of weights that autocast
    keeps for a forward, is let go for every block that one stands for."""
    if trace.depth is None:
        return changes
    repeated = np.zeros(len(storages), dtype=bool)
    for run, repeats in unrolled(trace):
        for piece in run if repeats > 1 else ():
            repeated[piece.events] = True
    made = {int(storage): place for place, storage in reversed(list(enumerate(storages)))}
    lifted = changes.copy()
    for place, storage in enumerate(storages.tolist()):
        if repeated[made[storage]] and not repeated[place]:
            lifted[place] *= trace.depth.repeats
    return lifted


def _run_through(trace: Trace, changes: Floats, live: Floats) -> tuple[Floats, Floats]:
    """(the most that was alive, what is in the end), going through all blocks of the whole model."""
    highest = live
    for run, repeats in unrolled(trace):
        rise, net = np.zeros_like(live), np.zeros_like(live)
        for piece in run:
            climbed = np.cumsum(changes[piece.events], axis=0)
            if len(climbed):
                rise = np.maximum(rise, net + climbed.max(0))
                net = net + climbed[-1]
        # The highest of a run that repeats is in its first round or in its last.
        highest = np.maximum(highest, live + rise)
        highest = np.maximum(highest, live + net * (repeats - 1) + rise)
        live = live + net * repeats
    return highest, live


def _freed_when_complete(trace: Trace, changes: Floats, storages: Ints, gradient: Ints) -> Floats:
    """The changes where each gradient is added to one that is there already, and let go."""
    freed = changes.copy()
    for place in np.flatnonzero(gradient).tolist():
        if changes[place].max() > 0:
            done = trace.completed[int(storages[place])]
            if done < len(freed):
                freed[done] -= changes[place]
        else:
            freed[place] = 0.0
    return freed


def _total(trace: Trace, sizes: Floats, last: dict[int, int], label: str) -> Floats:
    """Bytes of all storages of one kind, in all blocks of the whole model."""
    total = np.zeros(sizes.shape[1])
    for storage, place in last.items():
        if trace.labels.get(storage) == label:
            times = trace.depth.times(trace.owners.get(storage)) if trace.depth else 1
            total = total + sizes[place] * times
    return total
