"""The events of a shallow trace as arrays: what each adds to the live bytes, for every micro-batch
and rank of a grid at once."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from autofit.core.estimate import OF_SEVERAL
from autofit.core.hardware import Hardware
from autofit.estimate.recorder import HOST, Event, Mark
from autofit.estimate.scaling import UNSCALED, Floats, Grid, Symbols
from autofit.estimate.shallow_model import CHUNK, FROZEN
from autofit.estimate.step_trace import Span, Trace
from autofit.hardware.caching_allocator import MIN_BLOCK
from autofit.setup.saved_tensors import SMALLEST, WINDOW

_CONSTANT = ("parameters", "optimizer")
_GRADIENTS = "gradients"
_OF_WEIGHTS = {*_CONSTANT, _GRADIENTS, *OF_SEVERAL}


@dataclass(frozen=True)
class SegmentEvents:
    """The events of a trace.

    Attributes:
        sizes: [events, pairs of the grid], bytes of an event's storage after it.
        changes: the same, bytes that it adds to those alive, without parameters and optimizer
            state.
        made, ended: by storage its first event, and its last one.
    """

    trace: Trace
    sizes: Floats
    changes: Floats
    made: dict[int, int]
    ended: dict[int, int]

    @classmethod
    def of(
        cls,
        trace: Trace,
        grid: Grid,
        symbols: Symbols,
        hardware: Hardware,
    ) -> Self:
        """Those of a trace at each pair of a grid."""
        sizes = _sizes_of(trace, grid, symbols)
        if hardware.device == "cuda":
            sizes = np.ceil(sizes / MIN_BLOCK) * MIN_BLOCK

        changes = sizes.copy()
        made: dict[int, int] = {}
        ended: dict[int, int] = {}
        for index, event in enumerate(trace.events):
            storage = event.storage
            if storage in ended:
                changes[index] -= sizes[ended[storage]]
            if trace.labels.get(storage) in _CONSTANT:
                changes[index] = 0.0

            made.setdefault(storage, index)
            ended[storage] = index

        events = cls(
            trace,
            sizes,
            changes,
            made,
            ended,
        )
        events._count_frees_of_all_blocks()

        return events

    def others(self) -> Floats:
        """What is there before the forward, without parameters, state and buckets of gradients."""
        kept = []
        for index in range(self.trace.start("forward")):
            label = self.trace.labels.get(self.trace.events[index].storage)
            if label != _GRADIENTS:
                kept.append(index)

        total: Floats = self.changes[kept].sum(0)

        return total

    def let_go(self, spans: Sequence[Span]) -> Floats:
        """What the head's forward frees of what was made in the forward before it."""
        forward = [mark for mark, _ in spans if mark.phase == "forward"]
        from_blocks = itertools.dropwhile(
            lambda mark: mark.block in (None, CHUNK, FROZEN),
            forward,
        )
        head = [mark for mark in from_blocks if mark.block in (None, CHUNK)]
        total: Floats = np.zeros(self.changes.shape[1])
        if not head:
            return total

        made_before = range(self.trace.start("forward"), head[0].events)
        of_head = range(head[0].events, self.trace.start("backward"))
        freed = []
        for storage, made in self.made.items():
            if made in made_before and self.ended[storage] in of_head:
                freed.append(self.ended[storage])

        total -= self.changes[freed].sum(0)

        return total

    def with_added_gradients(self) -> Floats:
        """The changes where each gradient is added to an existing one and freed."""
        changes = self.changes.copy()
        forward = self.trace.start("forward")
        for storage, done in self.trace.completed.items():
            made = self.made[storage]
            ended = self.ended[storage]
            is_gradient = self.trace.labels.get(storage) == _GRADIENTS
            # Buckets of gradients are there all the time.
            if not is_gradient or done >= len(changes) or made < forward:
                continue

            if ended > made:
                changes[ended] -= self.changes[ended]

            changes[done] -= self.changes[made]

        return changes

    def offloaded(self, resident: Floats, spans: Sequence[Span]) -> Floats:
        """The changes where what a block saves for the backward leaves in its forward and returns
        in its backward.

        Args:
            resident: the changes where it stays.
        """
        changes = resident.copy()
        for storage, leaves, returns in self._moves(spans):
            changes[leaves] -= self._large(storage)
            changes[returns] += self._large(storage)

        for mark, after in spans:
            self._share_window(changes, mark, after)

        return changes

    def saved(self, mark: Mark, after: Mark) -> tuple[Floats, Floats, Floats]:
        """Of large storages made in this part of a forward and freed in the backward: (bytes of
        all, of the last one, how many)."""
        none = np.zeros(self.sizes.shape[1])
        if mark.phase != "forward":
            return none, none, none

        total = none
        newest = none
        count = none
        backward = self.trace.start("backward")
        for storage in self.trace.saved:
            is_here = mark.events <= self.made[storage] < after.events
            if is_here and self.ended[storage] >= backward:
                large = self._large(storage)
                total = total + large
                newest = np.where(large > 0.0, large, newest)
                count = count + (large > 0.0)

        return total, newest, count

    def total(self, label: str, *, among: Iterable[int] | None = None) -> Floats:
        """Bytes of all storages of one kind, or of some of them, in all blocks."""
        trace = self.trace
        total = np.zeros(self.sizes.shape[1])
        for storage in self.made if among is None else among:
            if trace.labels.get(storage) == label:
                blocks = trace.times(trace.owners.get(storage))
                total = total + self.sizes[self.made[storage]] * blocks

        return total

    def in_middle(self, storages: frozenset[int]) -> list[int]:
        """Those of some storages that are of the middle blocks: what rests on the host where they
        are streamed."""
        depth = self.trace.depth
        if depth is None:
            return []

        owners = self.trace.owners

        return [
            storage
            for storage in self.made
            if storage in storages and owners.get(storage) in depth.middle
        ]

    def count(self, storages: Iterable[int]) -> int:
        """How many these are in all blocks."""
        return sum(self.trace.times(self.trace.owners[storage]) for storage in storages)

    def _moves(self, spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
        """(storage, the event at which it leaves, the event at which it is back), within the
        block's own segments: those of middle blocks are repeated, so none may leave a move to the
        next."""
        for storage, stay in self.trace.saved.items():
            if stay.left is None or stay.returns is None:
                continue

            birth = _span_at(spans, self.made[storage])
            death = _span_at(spans, self.ended[storage])
            if not birth or not death:
                continue
            if birth[0].phase == "forward" and death[0].phase == "backward":
                leaves = min(stay.left, birth[1].events - 1)
                yield storage, leaves, max(stay.returns, death[0].events)

    def _share_window(self, changes: Floats, mark: Mark, after: Mark) -> None:
        """What was saved last, and what is prefetched, is on the device anyway: less of others
        waits there."""
        moments = []
        for storage, stay in self.trace.saved.items():
            event: int | None = stay.saved
            if mark.phase != "forward":
                event = None if stay.left is None else stay.returns
            if event is not None and mark.events <= event < after.events:
                moments.append((event, storage))

        taken = np.zeros(changes.shape[1])
        for event, storage in sorted(moments):
            takes = np.minimum(
                self._large(storage),
                WINDOW,
            )
            takes = np.where(takes > 0.0, takes, taken)
            changes[event] += taken - takes
            taken = takes

        if taken.any():
            changes[after.events - 1] += taken

    def _large(self, storage: int) -> Floats:
        """The bytes of a storage where they are enough to be moved, else 0."""
        sizes: Floats = self.sizes[self.made[storage]]
        return np.where(sizes >= SMALLEST, sizes, 0.0)

    def _count_frees_of_all_blocks(self) -> None:
        """Let what each block makes, and is freed between the blocks and the head, count for all
        blocks.

        Such are the low-precision copies of weights that autocast caches for a forward. What only
        the last block leaves there, its output, is told apart by the block before, which leaves
        none.
        """
        depth = self.trace.depth
        if depth is None:
            return

        spans = self.trace.spans("forward", "backward")
        born: dict[int, list[int]] = {}  # by block the storages made in its forward, in order
        for storage, index in self.made.items():
            span = _span_at(spans, index)
            if span and span[0].phase == "forward" and span[0].block is not None:
                born.setdefault(span[0].block, []).append(storage)

        scaled = []
        for block in depth.middle:
            before = born.get(
                block - depth.period,
                (),
            )
            for storage, counterpart in zip(born.get(block, ()), before, strict=False):
                end = self.ended[storage]
                death = _span_at(spans, end)
                is_outside = death is not None and death[0].block is None
                if is_outside and death is _span_at(spans, self.ended[counterpart]):
                    scaled.append(end)

        for end in scaled:
            self.changes[end] *= depth.repeats


def summed_amounts(
    parts: Sequence[tuple[int, ...]],
    of_weights: Sequence[bool],
    grid: Grid,
    symbols: Symbols,
) -> Floats:
    """Traced amounts at each pair, each the sum of its parts.

    Those of weights do not grow with the samples, though ranks join them to sums of any divisor.
    """
    traced = list(itertools.chain.from_iterable(parts))
    amounts = grid.amounts(traced, symbols)
    if not parts:
        return amounts

    counts = [len(sizes) for sizes in parts]
    if any(of_weights):
        of_weight = np.repeat(of_weights, counts)
        constant = grid.amounts(
            traced,
            replace(symbols, samples=UNSCALED.samples),
        )
        amounts = np.where(of_weight[:, None], constant, amounts)

    return np.add.reduceat(
        amounts,
        np.cumsum([0, *counts[:-1]]),
        axis=0,
    )


def share_of_samples(
    items: Sequence[tuple[str | None, tuple[int, ...]]],
    grid: Grid,
    symbols: Symbols,
) -> Floats:
    """By (name, sizes), the share of each item at each pair: of those that occur once or more for
    each sample, in equal sizes, as code does that works on each sample by itself."""
    prime = symbols.samples
    shared = {}
    for (name, sizes), count in Counter(items).items():
        is_by_sample = not count % prime and all(size % prime for size in sizes)
        shared[name, sizes] = is_by_sample and name != _GRADIENTS

    is_shared = np.array(
        [shared[item] for item in items],
        bool,
    )

    return np.where(is_shared[:, None], grid.samples / prime, 1.0)


def _sizes_of(trace: Trace, grid: Grid, symbols: Symbols) -> Floats:
    """Bytes of each event's storage after it; none of those on the host."""
    labels = [trace.labels.get(event.storage) for event in trace.events]
    parts = []
    of_weights = []
    for event, label in zip(trace.events, labels, strict=True):
        joined = trace.joined.get(event.storage) or (event.nbytes,)
        of_weights.append(len(joined) > 1 or label in _OF_WEIGHTS)
        parts.append(joined if sum(joined) == event.nbytes else (event.nbytes,))

    sizes = summed_amounts(
        parts,
        of_weights,
        grid,
        symbols,
    )
    sizes[np.array([label == HOST for label in labels], bool)] = 0.0
    if not trace.packed:
        return sizes

    for mark, after in trace.spans("forward", "backward"):
        span = slice(mark.events, after.events)
        kinds = [
            _kind(*labelled) for labelled in zip(labels[span], trace.events[span], strict=True)
        ]
        sizes[span] *= share_of_samples(kinds, grid, symbols)

    return sizes


def _kind(label: str | None, event: Event) -> tuple[str | None, tuple[int, ...]]:
    return label, (event.nbytes,)


def _span_at(spans: Sequence[Span], event: int) -> Span | None:
    return next(
        (span for span in spans if span[0].events <= event < span[1].events),
        None,
    )
