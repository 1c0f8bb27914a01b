"""Segments of a step: memory and work of one block, of the embedding or of the head.

A shallow trace is cut where blocks begin. A segment is described by its highest memory and by what it leaves behind,
both relative to its start. `autofit.estimate.schedules` puts any step together from them.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from autofit.core.estimate import OF_SEVERAL
from autofit.core.hardware import Hardware
from autofit.estimate.operator_costs import ATTENTION
from autofit.estimate.optimizer_state import Kind, Shapes
from autofit.estimate.recorder import HOST, Mark
from autofit.estimate.roofline import Work
from autofit.estimate.scaling import UNSCALED, Floats, Grid, Symbols
from autofit.estimate.shallow_model import CHUNK, FROZEN, Depth, with_chunks
from autofit.estimate.step_trace import Span, Trace
from autofit.hardware.caching_allocator import MIN_BLOCK
from autofit.setup.saved_tensors import SMALLEST, WINDOW

# How a step treats gradients and saved tensors: (whether gradients are added at once (accumulation) or applied (in
# backward), or stay; whether saved tensors are offloaded to the host, or stay).
Mode = tuple[bool, bool]
Repeats = int | Floats  # of segments in a row; for chunks, at each pair of a grid
_CONSTANT = ("parameters", "optimizer")
_OF_WEIGHTS = {*_CONSTANT, "gradients", *OF_SEVERAL}


@dataclass(frozen=True)
class Exchanged:
    """A collective with other ranks. `waits`: what follows waits for it."""

    kind: str
    nbytes: Floats
    waits: bool


@dataclass(frozen=True)
class Segment:
    """One stretch of a forward or a backward, in bytes at each pair of a grid."""

    phase: str
    block: int | None
    # (the highest above the start, the difference between end and start)
    memory: dict[Mode, tuple[Floats, Floats]]
    saved: Floats  # what goes to the host if saved tensors are offloaded
    newest: Floats  # the last of these tensors
    moved: Floats  # how many they are
    work: Work
    exchanged: tuple[Exchanged, ...] = ()

    @property
    def of_block(self) -> bool:
        """Whether it is of one of the repeated blocks."""
        return self.block not in (None, CHUNK, FROZEN)


@dataclass(frozen=True)
class Segments:
    """All segments of a shallow trace, and what exists from before the forward on, in bytes at each pair of a grid."""

    items: tuple[Segment, ...]
    depth: Depth | None  # how the traced blocks stand for all
    shapes: Shapes  # of the trained weights of all blocks
    parameters: Floats
    gradients: Floats
    others: Floats
    inputs: Floats  # of these, the micro-batch
    streamed: Floats  # weights of the middle blocks, which parameter_offload keeps on the host
    streamed_weights: int  # how many those are
    copied: Floats  # weights of a copy's middle blocks, which reference may keep on the host
    copied_weights: int  # how many those are
    let_go: Floats  # what the head's forward frees of what was made before it, the last block's output for one
    chunks: Floats  # how many the loss has
    by_flash: bool  # PyTorch's flash kernel computes all of the attention

    def of(self, phase: str, block: int | None) -> list[Segment]:
        """The segments of one block in one phase."""
        return [
            segment for segment in self.items if segment.phase == phase and segment.block == block
        ]

    @property
    def before_blocks(self) -> list[Segment]:
        """The segments of the forward before the first block: the embedding, and frozen models."""
        return list(itertools.takewhile(lambda segment: not segment.of_block, self.items))

    @property
    def after_blocks(self) -> list[Segment]:
        """The segments of the forward after the last block: the head, and each chunk of its loss."""
        rest = [segment for segment in self.items if segment.phase == "forward"]
        rest = rest[len(self.before_blocks) :]
        return [segment for segment in rest if not segment.of_block]

    @property
    def backward_of_head(self) -> list[Segment]:
        """The segments of the backward before the last block's one."""
        backward = [segment for segment in self.items if segment.phase == "backward"]
        return list(itertools.takewhile(lambda segment: not segment.of_block, backward))

    @cached_property
    def streamed_block(self) -> Floats:
        """Bytes of one block's weights that parameter_offload keeps on the host."""
        none: Floats = np.zeros_like(self.streamed)
        return self.streamed / (self.depth.whole - 2) if self.depth else none

    def times(self, segment: Segment) -> Repeats:
        """How often a segment occurs in a step of the whole model."""
        if segment.block == CHUNK:
            # wherever logits are computed, the first of two chunks stands for itself
            chunks = [each for each in self.items if each.block == CHUNK]
            is_first = next(n for n, each in enumerate(chunks) if each is segment) % 2 == 0
            return np.ones_like(self.chunks) if is_first else self.chunks - 1
        return self.depth.times(segment.block) if self.depth else 1


def segments_of(trace: Trace, grid: Grid, symbols: Symbols, hardware: Hardware) -> Segments:
    """The segments of a trace at each pair of a grid."""
    grid = with_chunks(grid, symbols, trace.chunks, trace.config.loss)
    events = _Events.of(trace, grid, symbols, hardware)
    spans = trace.spans("forward", "backward")
    modes = {(False, False): events.changes, (True, False): events.with_added_gradients()}
    modes |= {
        (added, True): events.offloaded(changes, spans) for (added, _), changes in modes.items()
    }
    items = []
    for mark, after in spans:
        costs = trace.costs[mark.costs : after.costs]
        work = Work.of(costs, grid, symbols, after.dispatched - mark.dispatched)
        if trace.packed:
            share = _share([(cost.call, cost.sizes) for cost in costs], grid, symbols)
            work = replace(work, flops=work.flops * share, nbytes=work.nbytes * share)
        memory = {
            mode: _climb(changes[mark.events : after.events]) for mode, changes in modes.items()
        }
        exchanged = [each for each in trace.collectives if mark.events <= each.event < after.events]
        parts = [each.parts or (each.nbytes,) for each in exchanged]
        sizes = _weights_or_not(parts, [not each.waits for each in exchanged], grid, symbols)
        found = (
            Exchanged(each.kind, size, each.waits)
            for each, size in zip(exchanged, sizes, strict=True)
        )
        items.append(
            Segment(mark.phase, mark.block, memory, *events.saved(mark, after), work, tuple(found))
        )
    shapes: Counter[Kind] = Counter()  # how many trained weights of each kind the whole model has
    for shape, dtype, block in trace.shapes:
        shapes[shape, dtype, block is not None] += trace.times(block)
    return Segments(
        items=tuple(items),
        depth=trace.depth,
        shapes=shapes,
        parameters=events.total("parameters"),
        gradients=events.total("gradients"),
        others=events.others(),
        inputs=events.total("inputs"),
        streamed=events.total("parameters", among=events.in_middle(trace.streamable)),
        streamed_weights=events.count(events.in_middle(trace.streamable)),
        copied=events.total("parameters", among=events.in_middle(trace.copied)),
        copied_weights=events.count(events.in_middle(trace.copied)),
        let_go=events.let_go(spans),
        chunks=grid.chunks,
        by_flash={"flash" in cost.name for cost in trace.costs if cost.kind == ATTENTION} == {True},
    )


def _share(
    items: Sequence[tuple[str | None, tuple[int, ...]]], grid: Grid, symbols: Symbols
) -> Floats:
    """By (name, sizes), the share of each item at each pair: of those that occur once or more for each sample, in equal
    sizes, as code does that works on each sample by itself."""
    counts, prime = Counter(items), symbols.samples
    shared = {
        (name, sizes): name != "gradients"
        and not count % prime
        and all(size % prime for size in sizes)
        for (name, sizes), count in counts.items()
    }
    return np.where(
        np.array([shared[item] for item in items], bool)[:, None], grid.samples / prime, 1.0
    )


def _weights_or_not(
    parts: Sequence[tuple[int, ...]], of_weights: Sequence[bool], grid: Grid, symbols: Symbols
) -> Floats:
    """Amounts at each pair, each the sum of its parts; of weights none grows with the samples, though ranks join them
    to sums of any divisor."""
    nbytes = [nbytes for each in parts for nbytes in each]
    constant = (
        grid.amounts(nbytes, replace(symbols, samples=UNSCALED.samples)) if any(of_weights) else 0.0
    )
    counts = [len(each) for each in parts]
    amounts = np.where(
        np.repeat(of_weights, counts)[:, None], constant, grid.amounts(nbytes, symbols)
    )
    return np.add.reduceat(amounts, np.cumsum([0, *counts[:-1]]), axis=0) if counts else amounts


def _span_at(spans: Sequence[Span], event: int) -> Span | None:
    return next((span for span in spans if span[0].events <= event < span[1].events), None)


def _climb(changes: Floats) -> tuple[Floats, Floats]:
    width = changes.shape[1]
    if not len(changes):
        return np.zeros(width), np.zeros(width)
    climbed = np.cumsum(changes, axis=0)
    return np.maximum(climbed.max(0), 0.0), climbed[-1]


@dataclass(frozen=True)
class _Events:
    """The events of a trace as arrays: what each adds to the live bytes, without parameters and optimizer state."""

    trace: Trace
    sizes: Floats
    changes: Floats
    made: dict[int, int]  # storage -> its first event
    ended: dict[int, int]  # storage -> its last one

    @classmethod
    def of(cls, trace: Trace, grid: Grid, symbols: Symbols, hardware: Hardware) -> Self:
        labels = [trace.labels.get(event.storage) for event in trace.events]
        joined = [trace.joined.get(event.storage) or (event.nbytes,) for event in trace.events]
        sums = zip(joined, trace.events, strict=True)
        nbytes = [parts if sum(parts) == event.nbytes else (event.nbytes,) for parts, event in sums]
        of_weights = [
            len(parts) > 1 or label in _OF_WEIGHTS
            for parts, label in zip(joined, labels, strict=True)
        ]
        sizes = _weights_or_not(nbytes, of_weights, grid, symbols)
        sizes[np.array([label == HOST for label in labels], bool)] = 0.0
        if trace.packed:
            for mark, after in trace.spans("forward", "backward"):
                span = trace.events[mark.events : after.events]
                of_span = labels[mark.events : after.events]
                keys = [
                    (label, (event.nbytes,)) for label, event in zip(of_span, span, strict=True)
                ]
                sizes[mark.events : after.events] *= _share(keys, grid, symbols)
        if hardware.device == "cuda":
            sizes = np.ceil(sizes / MIN_BLOCK) * MIN_BLOCK
        storages = [event.storage for event in trace.events]
        changes = sizes.copy()
        made: dict[int, int] = {}
        ended: dict[int, int] = {}
        for index, storage in enumerate(storages):
            if storage in ended:
                changes[index] -= sizes[ended[storage]]
            made.setdefault(storage, index)
            ended[storage] = index
        changes[np.array([trace.labels.get(storage) in _CONSTANT for storage in storages])] = 0.0
        return cls(trace, sizes, _freed_in_all_blocks(trace, changes, made, ended), made, ended)

    def others(self) -> Floats:
        """What is there before the forward, without parameters, state and buckets of gradients."""
        before = range(self.trace.start("forward"))
        labels = (self.trace.labels.get(self.trace.events[index].storage) for index in before)
        kept = [index for index, label in zip(before, labels, strict=True) if label != "gradients"]
        total: Floats = self.changes[kept].sum(0)
        return total

    def let_go(self, spans: Sequence[Span]) -> Floats:
        """What the head's forward frees of what was made in the forward before it."""
        forward = [mark for mark, _ in spans if mark.phase == "forward"]
        before = itertools.takewhile(lambda mark: mark.block in (None, CHUNK, FROZEN), forward)
        rest = forward[len(list(before)) :]
        head = [mark for mark in rest if mark.block in (None, CHUNK)]
        total: Floats = np.zeros(self.changes.shape[1])
        if head:
            made_before = range(self.trace.start("forward"), head[0].events)
            of_head = range(head[0].events, self.trace.start("backward"))
            freed = [
                self.ended[storage] for storage, made in self.made.items() if made in made_before
            ]
            total -= self.changes[[index for index in freed if index in of_head]].sum(0)
        return total

    def with_added_gradients(self) -> Floats:
        """The changes where each gradient is added to an existing one and freed."""
        changes, forward = self.changes.copy(), self.trace.start("forward")
        for storage, done in self.trace.completed.items():
            made, ended = self.made[storage], self.ended[storage]
            if (
                self.trace.labels.get(storage) != "gradients"
                or done >= len(changes)
                or made < forward
            ):
                continue  # buckets of gradients are there all the time
            if ended > made:
                changes[ended] -= self.changes[ended]
            changes[done] -= self.changes[made]
        return changes

    def offloaded(self, resident: Floats, spans: Sequence[Span]) -> Floats:
        """The changes where what a block saves for the backward leaves in its forward and returns in its backward."""
        changes = resident.copy()
        for storage, leaves, returns in self._moves(spans):
            changes[leaves] -= self._large(storage)
            changes[returns] += self._large(storage)
        for mark, after in spans:
            self._share_window(changes, mark, after)
        return changes

    def _share_window(self, changes: Floats, mark: Mark, after: Mark) -> None:
        """What was saved last, and what is prefetched, is on the device anyway: less of others waits there."""
        moments = (
            (
                stay.saved
                if mark.phase == "forward"
                else stay.returns
                if stay.left is not None
                else None,
                storage,
            )
            for storage, stay in self.trace.saved.items()
        )
        taken = np.zeros(changes.shape[1])
        for event, storage in sorted(
            (event, storage) for event, storage in moments if event is not None
        ):
            if mark.events <= event < after.events:
                takes = np.minimum(self._large(storage), WINDOW)
                takes = np.where(takes > 0.0, takes, taken)
                changes[event] += taken - takes
                taken = takes
        if taken.any():
            changes[after.events - 1] += taken

    def _large(self, storage: int) -> Floats:
        """The bytes of a storage where they are enough to be moved, else 0."""
        sizes: Floats = self.sizes[self.made[storage]]
        return np.where(sizes >= SMALLEST, sizes, 0.0)

    def saved(self, mark: Mark, after: Mark) -> tuple[Floats, Floats, Floats]:
        """Of large storages made in this part of a forward and freed in the backward: (bytes of all, of the last one,
        how many)."""
        total = newest = count = np.zeros(self.sizes.shape[1])
        if mark.phase != "forward":
            return total, newest, count
        backward = self.trace.start("backward")
        for storage in self.trace.saved:
            made = self.made[storage]
            if mark.events <= made < after.events and self.ended[storage] >= backward:
                large = self._large(storage)
                total, newest, count = (
                    total + large,
                    np.where(large > 0.0, large, newest),
                    count + (large > 0.0),
                )
        return total, newest, count

    def _moves(self, spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
        """(storage, the event at which it leaves, the event at which it is back), within the block's own segments."""
        # Segments of middle blocks are repeated, so none may leave a move to the next one.
        for storage, stay in self.trace.saved.items():
            if stay.left is None or stay.returns is None:
                continue
            birth = _span_at(spans, self.made[storage])
            death = _span_at(spans, self.ended[storage])
            if birth and death and birth[0].phase == "forward" and death[0].phase == "backward":
                yield (
                    storage,
                    min(stay.left, birth[1].events - 1),
                    max(stay.returns, death[0].events),
                )

    def total(self, label: str, *, among: Iterable[int] | None = None) -> Floats:
        """Bytes of all storages of one kind, or of some of them, in all blocks."""
        trace = self.trace
        total = np.zeros(self.sizes.shape[1])
        for storage in self.made if among is None else among:
            if trace.labels.get(storage) == label:
                total = total + self.sizes[self.made[storage]] * trace.times(
                    trace.owners.get(storage)
                )
        return total

    def in_middle(self, storages: frozenset[int]) -> list[int]:
        """Those of some storages that are of the middle blocks: what rests on the host where they are streamed."""
        depth = self.trace.depth
        if depth is None:
            return []
        owners = self.trace.owners
        return [each for each in self.made if each in storages and owners.get(each) in depth.middle]

    def count(self, storages: Iterable[int]) -> int:
        """How many these are in all blocks."""
        return sum(self.trace.times(self.trace.owners[each]) for each in storages)


def _freed_in_all_blocks(
    trace: Trace, changes: Floats, made: dict[int, int], ended: dict[int, int]
) -> Floats:
    """The changes where what each block makes and is freed between the blocks and the head counts for all blocks."""
    # Such are the low-precision copies of weights that autocast caches for a forward. What only the last block leaves
    # there, its output, is told apart by the block before, which leaves none.
    depth = trace.depth
    if depth is None:
        return changes
    spans = trace.spans("forward", "backward")
    born: dict[int, list[int]] = {}  # block -> storages made in its forward, in order
    for storage, index in made.items():
        span = _span_at(spans, index)
        if span and span[0].phase == "forward" and span[0].block is not None:
            born.setdefault(span[0].block, []).append(storage)
    scaled = changes.copy()
    for block in depth.middle:
        for storage, counterpart in zip(
            born.get(block, ()), born.get(block - depth.period, ()), strict=False
        ):
            death = _span_at(spans, ended[storage])
            if death and death[0].block is None and death is _span_at(spans, ended[counterpart]):
                scaled[ended[storage]] *= depth.repeats
    return scaled
