"""Segments of a step: memory and work of one block, of the embedding or of the head.

A shallow trace is cut where blocks begin. A segment is described by its highest memory and by what
it leaves behind, both relative to its start. `autofit.estimate.schedules` puts any step together
from them.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autofit.core.hardware import Hardware
from autofit.estimate.operator_costs import ATTENTION
from autofit.estimate.optimizer_state import Kind, Shapes
from autofit.estimate.recorder import Mark
from autofit.estimate.roofline import Work
from autofit.estimate.scaling import Floats, Grid, Symbols
from autofit.estimate.segment_events import SegmentEvents, share_of_samples, summed_amounts
from autofit.estimate.shallow_model import CHUNK, FROZEN, Depth, with_chunks
from autofit.estimate.step_trace import Trace

# How a step treats gradients and saved tensors: (whether gradients are added (accumulation) or
# applied (in the backward) at once, or stay; whether saved tensors are offloaded to the host, or
# stay).
Mode = tuple[bool, bool]
Repeats = int | Floats  # of segments in a row; for chunks, at each pair of a grid


@dataclass(frozen=True)
class Exchanged:
    """A collective with other ranks.

    Attributes:
        waits: what follows waits for it.
    """

    kind: str
    nbytes: Floats
    waits: bool


@dataclass(frozen=True)
class Segment:
    """One stretch of a forward or a backward, in bytes at each pair of a grid.

    Attributes:
        memory: by mode (the highest above the start, the difference between end and start).
        saved: what goes to the host if saved tensors are offloaded.
        newest: the last of these tensors.
        moved: how many they are.
    """

    phase: str
    block: int | None
    memory: dict[Mode, tuple[Floats, Floats]]
    saved: Floats
    newest: Floats
    moved: Floats
    work: Work
    exchanged: tuple[Exchanged, ...] = ()

    @property
    def of_block(self) -> bool:
        """Whether it is of one of the repeated blocks."""
        return self.block not in (None, CHUNK, FROZEN)


@dataclass(frozen=True)
class Segments:
    """All segments of a shallow trace, and what exists from before the forward on, in bytes at each
    pair of a grid.

    Attributes:
        depth: how the traced blocks stand for all.
        shapes: of the trained weights of all blocks.
        inputs: of the others, the micro-batch.
        streamed, streamed_weights: weights of the middle blocks, which parameter_offload keeps on
            the host, and how many those are.
        copied, copied_weights: the same of a copy of the model, which reference may keep on the
            host.
        let_go: what the head's forward frees of what was made before it, such as the last block's
            output.
        chunks: how many the loss has.
        by_flash: PyTorch's flash kernel computes all of the attention.
    """

    items: tuple[Segment, ...]
    depth: Depth | None
    shapes: Shapes
    parameters: Floats
    gradients: Floats
    others: Floats
    inputs: Floats
    streamed: Floats
    streamed_weights: int
    copied: Floats
    copied_weights: int
    let_go: Floats
    chunks: Floats
    by_flash: bool

    def of(self, phase: str, block: int | None) -> list[Segment]:
        """The segments of one block in one phase."""
        return [item for item in self.items if item.phase == phase and item.block == block]

    @property
    def before_blocks(self) -> list[Segment]:
        """The segments of the forward before the first block: the embedding, and frozen models."""
        return _before_blocks(self.items)

    @property
    def after_blocks(self) -> list[Segment]:
        """The segments of the forward after the last block: the head, and each chunk of its
        loss."""
        rest = [segment for segment in self.items if segment.phase == "forward"]
        rest = rest[len(self.before_blocks) :]

        return [segment for segment in rest if not segment.of_block]

    @property
    def backward_of_head(self) -> list[Segment]:
        """The segments of the backward before the last block's one."""
        return _before_blocks([item for item in self.items if item.phase == "backward"])

    @cached_property
    def streamed_block(self) -> Floats:
        """Bytes of one block's weights that parameter_offload keeps on the host."""
        if self.depth is None:
            return np.zeros_like(self.streamed)
        return self.streamed / max(self.depth.whole - 2, 1)

    def times(self, segment: Segment) -> Repeats:
        """How often a segment occurs in a step of the whole model."""
        if segment.block != CHUNK:
            return self.depth.times(segment.block) if self.depth else 1

        # Wherever logits are computed, the first of two chunks stands for itself.
        chunks = [id(item) for item in self.items if item.block == CHUNK]
        if chunks.index(id(segment)) % 2 == 0:
            return np.ones_like(self.chunks)

        return self.chunks - 1


def _before_blocks(segments: Sequence[Segment]) -> list[Segment]:
    """Those before the first one of a block."""
    return list(itertools.takewhile(lambda segment: not segment.of_block, segments))


def segments_of(
    trace: Trace,
    grid: Grid,
    symbols: Symbols,
    hardware: Hardware,
) -> Segments:
    """The segments of a trace at each pair of a grid."""
    grid = with_chunks(grid, symbols, trace.chunks, trace.config.loss)
    events = SegmentEvents.of(trace, grid, symbols, hardware)
    spans = trace.spans("forward", "backward")
    changes: dict[Mode, Floats] = {
        (False, False): events.changes,
        (True, False): events.with_added_gradients(),
    }
    for added in (False, True):
        changes[added, True] = events.offloaded(changes[added, False], spans)

    items = []
    for mark, after in spans:
        within = slice(mark.events, after.events)
        memory = {mode: _climb(change[within]) for mode, change in changes.items()}
        saved, newest, moved = events.saved(mark, after)

        segment = Segment(
            phase=mark.phase,
            block=mark.block,
            memory=memory,
            saved=saved,
            newest=newest,
            moved=moved,
            work=_work(trace, mark, after, grid, symbols),
            exchanged=_exchanged(trace, mark, after, grid, symbols),
        )

        items.append(segment)

    streamed = events.in_middle(trace.streamable)
    copied = events.in_middle(trace.copied)
    attention = {"flash" in cost.name for cost in trace.costs if cost.kind == ATTENTION}

    return Segments(
        items=tuple(items),
        depth=trace.depth,
        shapes=_shapes(trace),
        parameters=events.total("parameters"),
        gradients=events.total("gradients"),
        others=events.others(),
        inputs=events.total("inputs"),
        streamed=events.total("parameters", among=streamed),
        streamed_weights=events.count(streamed),
        copied=events.total("parameters", among=copied),
        copied_weights=events.count(copied),
        let_go=events.let_go(spans),
        chunks=grid.chunks,
        by_flash=attention == {True},
    )


def _work(
    trace: Trace,
    mark: Mark,
    after: Mark,
    grid: Grid,
    symbols: Symbols,
) -> Work:
    """What is computed between two marks."""
    costs = trace.costs[mark.costs : after.costs]
    work = Work.of(costs, grid, symbols, after.dispatched - mark.dispatched)
    if not trace.packed:
        return work

    share = share_of_samples(
        [(cost.call, cost.sizes) for cost in costs],
        grid,
        symbols,
    )

    return replace(work, flops=work.flops * share, nbytes=work.nbytes * share)


def _exchanged(
    trace: Trace,
    mark: Mark,
    after: Mark,
    grid: Grid,
    symbols: Symbols,
) -> tuple[Exchanged, ...]:
    """What ranks exchange between two marks."""
    here = [
        collective
        for collective in trace.collectives
        if mark.events <= collective.event < after.events
    ]
    parts = [collective.parts or (collective.nbytes,) for collective in here]

    # What nothing waits for are weights and their gradients.
    sizes = summed_amounts(
        parts,
        [not collective.waits for collective in here],
        grid,
        symbols,
    )
    pairs = zip(here, sizes, strict=True)

    return tuple(
        Exchanged(collective.kind, nbytes, collective.waits) for collective, nbytes in pairs
    )


def _shapes(trace: Trace) -> Shapes:
    """How many trained weights of each kind the whole model has."""
    shapes: Counter[Kind] = Counter()
    for shape, dtype, block in trace.shapes:
        shapes[shape, dtype, block is not None] += trace.times(block)

    return shapes


def _climb(changes: Floats) -> tuple[Floats, Floats]:
    """(the highest sum of the first changes, that of all), at each pair."""
    if not len(changes):
        none = np.zeros(changes.shape[1])
        return none, none

    climbed = np.cumsum(changes, axis=0)

    return np.maximum(climbed.max(0), 0.0), climbed[-1]
