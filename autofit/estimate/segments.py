"""Pieces of a step: what the work of one block, of the embedding or of the head does to memory and costs in time.

A shallow trace is cut where blocks begin. Each piece is told by what it leaves behind and the most it held meanwhile,
both counted from its start. Any step is a row of such pieces: those of the middle blocks follow one another as often as
the model has such blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.core.hardware import Hardware
from autofit.estimate.chunks import CHUNK, with_chunks
from autofit.estimate.operator_costs import ATTENTION
from autofit.estimate.optimizer_state import Kind, Shapes
from autofit.estimate.peak import ROUNDING
from autofit.estimate.recorder import Mark
from autofit.estimate.roofline import Work
from autofit.estimate.scaling import Floats, Grid, Ints, Symbols
from autofit.estimate.shallow_model import Depth
from autofit.estimate.trace import Trace
from autofit.setup.saved_tensors import SMALLEST, WINDOW

# How a step treats gradients, and what is saved for the backward: gradients stay as they come, or are added at once to
# others (accumulation) or applied (in backward); saved tensors stay, or wait on the host.
FIRST, ADDED, FIRST_AWAY, ADDED_AWAY = "first", "added", "first, away", "added, away"
Repeats = int | Floats  # how often pieces follow one another; of chunks, at each pair of a grid
Row = list[tuple[Sequence["Piece"], Repeats]]
_KEPT = ("parameters", "optimizer")


@dataclass(frozen=True)
class Piece:
    """One stretch of a forward or a backward.

    `memory` is, for each way of treating gradients and saved tensors, (the most that was alive above the start, what is
    alive more at the end) in bytes at each pair of a grid; `saved` the bytes that go to the host where saved tensors
    wait there, and `newest` those of the last of them; `work` what its operators come to.
    """

    phase: str
    block: int | None
    memory: dict[str, tuple[Floats, Floats]]
    saved: Floats
    newest: Floats
    work: Work


@dataclass(frozen=True)
class Pieces:
    """All pieces of a shallow trace, and what is there before the forward and stays, in bytes at each pair of a grid.

    `depth` is how the traced blocks stand for all, `shapes` are of the trained weights of all of them, `streamed`
    the frozen weights of the middle blocks, which parameter_offload keeps on the host, and `chunks` how many there are
    of the loss; `by_flash` says that PyTorch's flash kernel computes all of the attention.
    """

    row: tuple[Piece, ...]
    depth: Depth | None
    shapes: Shapes
    parameters: Floats
    gradients: Floats
    others: Floats
    streamed: Floats
    chunks: Floats
    by_flash: bool

    def of(self, phase: str, block: int | None) -> Iterator[Piece]:
        """The pieces of one block in one phase."""
        return (piece for piece in self.row if piece.phase == phase and piece.block == block)

    def head(self) -> Row:
        """What comes in the forward after the last block: all of the head, and each chunk of its loss."""
        _, *others = (piece for piece in self.row if piece.phase == "forward")  # the first is the embedding
        return [([piece], self.times(piece)) for piece in others if piece.block in (None, CHUNK)]

    def times(self, piece: Piece) -> Repeats:
        """How often a piece comes in a step of the whole model."""
        if piece.block == CHUNK:
            first = next(each for each in self.row if each.block == CHUNK)
            return np.ones_like(self.chunks) if piece is first else self.chunks - 1
        return self.depth.times(piece.block) if self.depth else 1


def cut_into_pieces(trace: Trace, grid: Grid, symbols: Symbols, hardware: Hardware) -> Pieces:
    """The pieces of a trace at each pair of a grid."""
    grid = with_chunks(grid, symbols, trace.chunks, str(trace.config["loss"]))
    events = _Events.of(trace, grid, symbols, hardware)
    spans = list(_spans(trace))
    ways = {FIRST: events.changes, ADDED: events.added(), FIRST_AWAY: events.away(events.changes, spans)}
    ways[ADDED_AWAY] = events.away(ways[ADDED], spans)
    row = []
    for mark, after in spans:
        costs = trace.costs[mark.costs : after.costs]
        work = Work.of(costs, grid, symbols, after.dispatched - mark.dispatched)
        memory = {way: _climb(changes[mark.events : after.events]) for way, changes in ways.items()}
        row.append(Piece(mark.phase, mark.block, memory, *events.saved(mark, after), work))
    start = next(mark.events for mark in trace.marks if mark.phase == "forward")
    return Pieces(
        row=tuple(row),
        depth=trace.depth,
        shapes=_shapes(trace),
        parameters=events.total("parameters"),
        gradients=events.total("gradients"),
        others=events.changes[:start].sum(0),
        streamed=events.streamed(),
        chunks=grid.chunks,
        by_flash={"flash" in cost.name for cost in trace.costs if cost.kind == ATTENTION} == {True},
    )


def _shapes(trace: Trace) -> Shapes:
    """How many trained weights of each shape and dtype the whole model has."""
    counted: Counter[Kind] = Counter()
    for shape, dtype, block in trace.shapes:
        counted[shape, dtype] += trace.depth.times(block) if trace.depth else 1
    return counted


def _spans(trace: Trace) -> Iterator[tuple[Mark, Mark]]:
    for mark, after in zip(trace.marks, trace.marks[1:], strict=False):
        if mark.phase in ("forward", "backward"):
            yield mark, after


def _climb(changes: Floats) -> tuple[Floats, Floats]:
    width = changes.shape[1]
    if not len(changes):
        return np.zeros(width), np.zeros(width)
    climbed = np.cumsum(changes, axis=0)
    return np.maximum(climbed.max(0), 0.0), climbed[-1]


@dataclass(frozen=True)
class _Events:
    """The events of a trace as arrays: what each adds to the live bytes, parameters and optimizer state left out."""

    trace: Trace
    sizes: Floats
    storages: Ints
    changes: Floats
    made: dict[int, int]  # storage -> its first event
    ended: dict[int, int]  # storage -> its last one

    @classmethod
    def of(cls, trace: Trace, grid: Grid, symbols: Symbols, hardware: Hardware) -> _Events:
        sizes = grid.amounts((event.nbytes for event in trace.events), symbols)
        if hardware.device == "cuda":
            sizes = np.ceil(sizes / ROUNDING) * ROUNDING
        storages = np.fromiter((event.storage for event in trace.events), dtype=np.int64)
        changes = sizes.copy()
        made: dict[int, int] = {}
        ended: dict[int, int] = {}
        for place, storage in enumerate(storages.tolist()):
            if storage in ended:
                changes[place] -= sizes[ended[storage]]
            made.setdefault(storage, place)
            ended[storage] = place
        kept = np.array([trace.labels.get(storage) in _KEPT for storage in storages.tolist()])
        changes[kept] = 0.0
        return cls(trace, sizes, storages, _for_all_blocks(trace, changes, made, ended), made, ended)

    def added(self) -> Floats:
        """The changes where each gradient is added to one that is there already, and let go."""
        changes = self.changes.copy()
        for storage, done in self.trace.completed.items():
            if self.trace.labels.get(storage) != "gradients" or done >= len(changes):
                continue
            made, ended = self.made[storage], self.ended[storage]
            if ended > made:
                changes[ended] -= self.changes[ended]
            changes[done] -= self.changes[made]
        return changes

    def away(self, given: Floats, spans: Sequence[tuple[Mark, Mark]]) -> Floats:
        """The changes where what a block saves for the backward leaves in its forward and is back in its backward."""
        changes = given.copy()
        for storage, leaves, returns in self._saved(spans):
            changes[leaves] -= self._large(storage)
            changes[returns] += self._large(storage)
        for mark, after in spans:
            self._share_window(changes, mark, after)
        return changes

    def _share_window(self, changes: Floats, mark: Mark, after: Mark) -> None:
        """What was saved last is on the device in any case, what is fetched ahead too: less of others waits there."""
        moments = (
            (stay.saved if mark.phase == "forward" else stay.returns if stay.left is not None else None, storage)
            for storage, stay in self.trace.saved.items()
        )
        taken = np.zeros(changes.shape[1])
        for when, storage in sorted((when, storage) for when, storage in moments if when is not None):
            if mark.events <= when < after.events:
                takes = np.minimum(self._large(storage), WINDOW)
                takes = np.where(takes > 0.0, takes, taken)
                changes[when] += taken - takes
                taken = takes
        if taken.any():
            changes[after.events - 1] += taken

    def _large(self, storage: int) -> Floats:
        """The bytes of a storage, where they are enough to be moved."""
        sizes: Floats = self.sizes[self.made[storage]]
        return np.where(sizes >= SMALLEST, sizes, 0.0)

    def saved(self, mark: Mark, after: Mark) -> tuple[Floats, Floats]:
        """Bytes of large storages that are made in this part of a forward and let go in the backward; of the last."""
        total = newest = np.zeros(self.sizes.shape[1])
        if mark.phase != "forward":
            return total, newest
        backward = next(each.events for each in self.trace.marks if each.phase == "backward")
        for storage in self.trace.saved:
            made = self.made[storage]
            if mark.events <= made < after.events and self.ended[storage] >= backward:
                large = self._large(storage)
                total, newest = total + large, np.where(large > 0.0, large, newest)
        return total, newest

    def _saved(self, spans: Sequence[tuple[Mark, Mark]]) -> Iterator[tuple[int, int, int]]:
        """(storage, the event at which it leaves, the event at which it is back), in the blocks' own stretches.

        The middle blocks' follow one another, so none may leave what it leaves to do to the next.
        """
        for storage, stay in self.trace.saved.items():
            if stay.left is None or stay.returns is None:
                continue
            born = _span_at(spans, self.made[storage])
            gone = _span_at(spans, self.ended[storage])
            if born and gone and born[0].phase == "forward" and gone[0].phase == "backward":
                yield storage, min(stay.left, born[1].events - 1), max(stay.returns, gone[0].events)

    def total(self, label: str) -> Floats:
        """Bytes of all storages of one kind, in all blocks of the whole model."""
        total = np.zeros(self.sizes.shape[1])
        for storage, made in self.made.items():
            if self.trace.labels.get(storage) == label:
                times = self.trace.depth.times(self.trace.owners.get(storage)) if self.trace.depth else 1
                total = total + self.sizes[made] * times
        return total

    def streamed(self) -> Floats:
        """Bytes of frozen weights in all blocks but two, where there are more: what parameter_offload keeps away."""
        depth, trace = self.trace.depth, self.trace
        total = np.zeros(self.sizes.shape[1])
        if depth is None:
            return total
        for storage, made in self.made.items():
            frozen = trace.labels.get(storage) == "parameters" and storage not in trace.trained
            if frozen and trace.owners.get(storage) in depth.standing_for:
                total = total + self.sizes[made] * depth.repeats
        return total


def _span_at(spans: Sequence[tuple[Mark, Mark]], event: int) -> tuple[Mark, Mark] | None:
    return next((span for span in spans if span[0].events <= event < span[1].events), None)


def _for_all_blocks(trace: Trace, changes: Floats, made: dict[int, int], ended: dict[int, int]) -> Floats:
    """What every block has made and is let go between the blocks and the head, as the low copies of weights that
    autocast keeps for a forward, is let go for all blocks that one stands for.

    Told from what only the last block leaves there, its output, by the block before: the same of it goes there too.
    """
    depth = trace.depth
    if depth is None:
        return changes
    spans = list(_spans(trace))
    born: dict[int, list[int]] = {}  # block -> storages made in its forward, in order
    for storage, place in made.items():
        span = _span_at(spans, place)
        if span and span[0].phase == "forward" and span[0].block is not None:
            born.setdefault(span[0].block, []).append(storage)
    lifted = changes.copy()
    for block in depth.standing_for:
        for storage, other in zip(born.get(block, ()), born.get(block - depth.period, ()), strict=False):
            gone = _span_at(spans, ended[storage])
            if gone and gone[0].block is None and gone is _span_at(spans, ended[other]):
                lifted[ended[storage]] *= depth.repeats
    return lifted


def run_through(row: Row, way: str, live: Floats) -> tuple[Floats, Floats]:
    """(the most that was alive, what is alive in the end) of a step that begins with `live` bytes."""
    highest = live
    for run, repeats in row:
        rise, net = np.zeros_like(live), np.zeros_like(live)
        for piece in run:
            climbed, more = piece.memory[way]
            rise, net = np.maximum(rise, net + climbed), net + more
        # The highest of what is repeated is in its first round or in its last.
        highest = np.maximum(np.maximum(highest, live + rise), live + net * (repeats - 1) + rise)
        live = live + net * repeats
    return highest, live


def as_traced(pieces: Pieces) -> Row:
    """The row of the whole model, all blocks as they were traced."""
    row: list[tuple[list[Piece], Repeats]] = []
    for piece in pieces.row:
        repeats = pieces.times(piece)
        before = row[-1][0][-1] if row else None
        chunks = CHUNK in (piece.block, before and before.block)  # each of which comes as often as its pair says
        if before and not chunks and row[-1][1] == repeats and before.phase == piece.phase:
            row[-1][0].append(piece)
        else:
            row.append(([piece], repeats))
    return list(row)


def alternating(plain: Pieces, full: Pieces) -> Row:
    """Every second block checkpointed, never the last: activation_checkpointing, `alternate`."""
    depth = plain.depth
    assert depth is not None and depth.period == 1, "blocks that are all alike"
    kinds = [full if block % 2 == depth.whole % 2 else plain for block in range(depth.whole)]
    middle, last = depth.standing_for[0], depth.standing_for[0] + 1  # as they were traced
    pairs, rest = divmod(depth.repeats, 2)
    two = kinds[middle : middle + 2]

    def of(kind: Pieces, phase: str, block: int | None) -> list[Piece]:
        return list(kind.of(phase, block))

    row: Row = [(of(plain, "forward", None)[:1], 1)]
    row += [(of(kinds[block], "forward", block), 1) for block in range(middle)]
    row += [(of(two[0], "forward", middle) + of(two[1], "forward", middle), pairs)]
    row += [(of(two[0], "forward", middle), rest), (of(plain, "forward", last) + of(plain, "forward", None)[1:], 1)]
    row += [(of(plain, "backward", None) + of(plain, "backward", last), 1), (of(two[0], "backward", middle), rest)]
    row += [(of(two[1], "backward", middle) + of(two[0], "backward", middle), pairs)]
    row += [(of(kinds[block], "backward", block), 1) for block in reversed(range(middle))]
    return row


def with_head(row: Row, head: Pieces) -> Row:
    """The row with the head's forward and backward taken from other pieces."""
    first, ends = row[0][0][0], next(head.of("backward", None))
    forward = [(run, repeats) for run, repeats in row if run[0].phase == "forward"]
    blocks = [([each for each in run if each is first or each.block not in (None, CHUNK)], n) for run, n in forward]
    backward = list(row[len(forward) :])
    run, repeats = backward[0]
    backward[0] = [ends, *run[1:]], repeats
    return [(run, n) for run, n in blocks if run] + head.head() + backward
