"""The trace of one training step: what it does with memory, event by event, and what its operators
cost."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch

from autofit.core.config import Config
from autofit.estimate.operator_costs import Cost
from autofit.estimate.operators import Calls
from autofit.estimate.recorder import Collective, Event, Mark
from autofit.estimate.roofline import Speed, passes_of, waits_of
from autofit.estimate.saved_activations import Stay
from autofit.estimate.shallow_model import Depth

# Blocks that are counted from the first one, as the rest are from the last: a block's neighbours
# matter for it, and few others do.
_FROM_START = 3

Key = TypeVar("Key")
Figure = TypeVar("Figure", int, float)
Span = tuple[Mark, Mark]  # a mark and the next one
# A stretch of a step: its phase, its block, and how many stretches of both came before it.
Section = tuple[str, int | None, int]


@dataclass(frozen=True)
class Trace:
    """What a step does with memory, event by event, and what its operators cost.

    Attributes:
        events: from building the model to the end of the step.
        marks: where build, state, forward, backward, update and end begin, and blocks in forward
            and backward.
        labels, owners, kin, streams, joined, completed, products: as of the Recorder.
        trained: the storages of trained parameters: of those that a backward reaches.
        streamable: the storages of weights that parameter_offload may keep on the host.
        copied: the same of a copy of the model that is not trained.
        saved: the storages that autograd alone holds for the backward, where asked for.
        chunks: (tokens, features, vocabulary) of a loss that was traced by two chunks.
        shapes: shape, on this rank, and dtype of every trained parameter, and its block.
        parameters: how many numbers are trained, on all ranks together.
        passed_bytes: of what a stage of a pipeline passes on for each micro-batch.
        collectives: what is exchanged with other ranks, in order.
        calls: the arguments of operators, where the target is the CPU.
        depth: how the blocks stand for those of a deeper model; None where all are there.
        packed: samples are not the rows of tensors, and code may work on each by itself.
        assumptions: what stand-ins take for granted, in sentences.
        between: the events of an evaluation and of a saving after the step, as far as they could be
            followed; of a whole model alone.
        reserved: what allocators reserve for it, by (bytes of libraries' workspaces, expandable
            segments).
        shallower: of a deep model, of which few blocks were followed, the trace of still fewer of
            them.
        missing: how many times what it has more than that the whole model has more than it.
        whole: a trace with the events of the whole model then, and without costs; of a stage of a
            pipeline, with what other micro-batches hold beside the traced one.
        stages: of a pipeline, the traces of all stages, of which this is the first.
    """

    config: Config
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    labels: dict[int, str]
    owners: dict[int, int]
    kin: dict[int, int]
    streams: dict[int, str]
    joined: dict[int, tuple[int, ...]]
    completed: dict[int, int]
    products: dict[str, int]
    trained: frozenset[int]
    streamable: frozenset[int]
    copied: frozenset[int]
    saved: dict[int, Stay]
    chunks: tuple[int, int, int] | None
    shapes: tuple[tuple[torch.Size, torch.dtype, int | None], ...]
    costs: tuple[Cost, ...]
    collectives: tuple[Collective, ...]
    calls: Calls
    depth: Depth | None
    parameters: int = 0
    passed_bytes: int = 0
    packed: bool = False
    assumptions: tuple[str, ...] = ()
    between: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)
    reserved: dict[tuple[int, bool], int] = field(default_factory=dict)
    shallower: "Trace | None" = None
    missing: int = 0
    whole: "Trace | None" = None
    stages: tuple["Trace", ...] = ()

    def of_whole(self, figures: Callable[["Trace"], dict[Key, Figure]]) -> dict[Key, Figure]:
        """Figures of the whole model, each of which grows by as much with every block."""
        deeper = figures(self)
        if self.shallower is None:
            return deeper

        shallower = figures(self.shallower)
        whole = {}
        for name, figure in deeper.items():
            if name in shallower:
                grown = figure + self.missing * (figure - shallower[name])
                whole[name] = round(grown) if isinstance(figure, int) else float(grown)

        return whole

    def stretches(self) -> list[Section]:
        """The stretch that begins at each mark.

        Blocks are counted from the last one, which is -1, but for the first few.
        """
        blocks = 1 + max((mark.block for mark in self.marks if mark.block is not None), default=0)
        seen: Counter[tuple[str, int | None]] = Counter()
        found = []
        for mark in self.marks:
            block = mark.block
            if block is not None and block >= _FROM_START:
                block -= blocks

            found.append((mark.phase, block, seen[mark.phase, block]))
            seen[mark.phase, block] += 1

        return found

    def phase_at(self, event: int) -> str:
        """The phase that an event belongs to."""
        return self.marks[bisect_right(self.marks, event, key=lambda mark: mark.events) - 1].phase

    def start(self, phase: str) -> int:
        """The number of events before a phase begins, all where it has none."""
        return next(
            (mark.events for mark in self.marks if mark.phase == phase),
            len(self.events),
        )

    def costs_of(self, phase: str) -> tuple[Cost, ...]:
        """The costs of one phase."""
        return tuple(
            cost
            for mark, after in self.spans(phase)
            for cost in self.costs[mark.costs : after.costs]
        )

    def times(self, block: int | None) -> int:
        """How many blocks one of them stands for."""
        return self.depth.times(block) if self.depth else 1

    def spans(self, *phases: str) -> list[Span]:
        """The parts of these phases, one for each block."""
        return [(mark, after) for mark, after in pairwise(self.marks) if mark.phase in phases]

    def waits(
        self,
        spans: Sequence[Span],
        speed: Speed,
        *,
        overlapping: bool = False,
    ) -> dict[str, float]:
        """The seconds of the operators of some parts of one phase, by what they wait for; see
        `waits_of`."""
        costs = [cost for mark, after in spans for cost in self.costs[mark.costs : after.costs]]
        dispatched = sum(after.dispatched - mark.dispatched for mark, after in spans)
        passes = max((passes_of(self.config, mark.phase) for mark, _ in spans), default=0)

        return waits_of(
            costs,
            speed,
            dispatched=dispatched,
            passes=passes,
            overlapping=overlapping,
        )
