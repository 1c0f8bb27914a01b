"""How long a step of one of several ranks takes, from the trace of it: what it computes, and what
it exchanges beside.

What FSDP2 and DDP exchange overlaps with computation, but on CPUs; layers and tokens that are split
wait for theirs.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.links import Links
from autofit.core.workload import Workload
from autofit.distributed.collectives import Group, seconds
from autofit.estimate.overlap import Runs, Unit, micro_batch, one_after_another, redistributing
from autofit.estimate.rates import UNKNOWN, rates_for
from autofit.estimate.recorder import Collective
from autofit.estimate.roofline import Speed
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import trace_skeleton
from autofit.estimate.step_trace import Span, Trace
from autofit.hardware.catalogue import links_of


@dataclass(frozen=True)
class Exchanges:
    """What a rank computes and exchanges in a step.

    Attributes:
        last: forward and backward of its last micro-batch.
        each: forward and backward of each of the `earlier` ones.
        update: the seconds of its update, in which it exchanges nothing.
        in_turn: it does not compute while it exchanges.
    """

    last: tuple[Runs, Runs]
    each: tuple[Runs, Runs]
    earlier: int
    update: float = 0.0
    in_turn: bool = False

    def seconds(self, slower: float = 1.0) -> float:
        """The seconds of all micro-batches where everything is computed so many times slower."""
        of_units = one_after_another if self.in_turn else micro_batch
        last, each = (
            of_units(*(_slowed(runs, slower) for runs in both)) for both in (self.last, self.each)
        )

        return float(last + self.earlier * each)

    def waiting(self, computing: float) -> float:
        """How many seconds more than its computation a step takes, where that takes so long."""
        last, each = (
            sum(unit.computing * repeats for runs in both for run, repeats in runs for unit in run)
            for both in (self.last, self.each)
        )
        micro = last + self.earlier * each
        slower = computing / float(micro + self.update)

        return max(0.0, self.seconds(slower) - slower * float(micro))


def _slowed(runs: Runs, slower: float) -> Runs:
    return [
        ([replace(unit, computing=slower * unit.computing) for unit in run], repeats)
        for run, repeats in runs
    ]


def step_seconds(
    traced: Trace,
    speed: Speed,
    hardware: Hardware,
    links: Links,
) -> float:
    """The seconds of all micro-batches of a step."""
    return _exchanges(traced, speed, hardware, links).seconds()


def _exchanges(
    traced: Trace,
    speed: Speed,
    hardware: Hardware,
    links: Links,
) -> Exchanges:
    """The traced micro-batch is the last, after which gradients of replicas and of adapters are
    averaged; other shards are reduced in each."""
    units = _Units(traced, speed, hardware, links)
    layout = Layout.of(traced.config)
    adapters = bool(traced.config.lora_rank)
    earlier = (traced.config.gradient_accumulation_steps or 1) - 1
    reduced = () if adapters or layout.shard * layout.context == 1 else ("reduce_scatter",)
    last = units.all(("reduce_scatter", "all_reduce"))
    each = units.all(reduced)

    return Exchanges(
        last,
        each,
        earlier,
        in_turn=not speed.asynchronous,
    )


def exchanges_of(workload: Workload, hardware: Hardware, config: Config) -> Exchanges:
    """What the first rank of a config exchanges, and the computation beside it.

    Raises:
        UntraceableError: the model's code needs values.
    """
    skeleton = Skeleton.cut_short(
        workload,
        hardware,
        Cut.of(config),
    )
    traced = trace_skeleton(workload, config, hardware, skeleton)
    rates = rates_for(hardware) or UNKNOWN

    found = _exchanges(
        traced,
        Speed.of(rates, hardware, config),
        hardware,
        links_of(hardware),
    )
    sizes = [(math.prod(shape), traced.times(block)) for shape, _, block in traced.shapes]
    updated = sum(
        traced.waits(traced.spans("update"), Speed.of_update(rates, hardware, config)).values()
    )

    return replace(
        found,
        update=updated
        * sum(size * times for size, times in sizes)
        / sum(size for size, _ in sizes),
    )


class _Units:
    def __init__(
        self,
        traced: Trace,
        speed: Speed,
        hardware: Hardware,
        links: Links,
    ) -> None:
        self._traced = traced
        self._speed = speed
        self._hardware = hardware
        self._links = links

    def all(self, reduced: Sequence[str]) -> tuple[Runs, Runs]:
        """The model's beginning, its blocks, and its end, forward and backward.

        Args:
            reduced: the collectives that gradients take part in.
        """
        traced = self._traced
        forward, backward = (_by_block(traced.spans(phase)) for phase in ("forward", "backward"))
        ahead = [([self._unit(spans)], traced.times(block)) for block, spans in forward]
        back = [([self._unit(spans, reduced)], traced.times(block)) for block, spans in backward]

        return ahead, back

    def _unit(self, spans: Sequence[Span], reduced: Sequence[str] = ()) -> Unit:
        return Unit(
            computing=self._computing(spans),
            waited=self._waited(spans),
            gather=self._exchanging(self._beside(spans, ("all_gather",))),
            reduce=self._exchanging(self._beside(spans, reduced)),
        )

    def _computing(self, spans: Sequence[Span]) -> float:
        return sum(self._traced.waits(spans, self._speed).values())

    def _waited(self, spans: Sequence[Span]) -> float:
        waited_for = [collective for collective in self._of(spans) if collective.waits]
        return self._exchanging(waited_for) + redistributing(self._speed) * len(waited_for)

    def _beside(self, spans: Sequence[Span], kinds: Sequence[str]) -> Iterable[Collective]:
        return (
            collective
            for collective in self._of(spans)
            if not collective.waits and collective.kind in kinds
        )

    def _of(self, spans: Sequence[Span]) -> list[Collective]:
        found = self._traced.collectives
        return [
            collective
            for mark, after in spans
            for collective in found
            if mark.events <= collective.event < after.events
        ]

    def _exchanging(self, collectives: Iterable[Collective]) -> float:
        groups = (
            (collective, group_of(collective.ranks, collective.stride, self._hardware))
            for collective in collectives
        )

        return sum(
            float(seconds(collective.kind, collective.nbytes, group, self._links))
            for collective, group in groups
        )


def _by_block(spans: Sequence[Span]) -> list[tuple[int | None, list[Span]]]:
    """Parts of a phase, of one block in a row together."""
    return [
        (block, list(parts))
        for block, parts in itertools.groupby(spans, key=lambda span: span[0].block)
    ]


def group_of(ranks: int, stride: int, hardware: Hardware) -> Group:
    """So many ranks, each so far from the next one in the order of ranks, in which nodes are
    filled."""
    devices = min(ranks, max(1, hardware.devices // stride))
    return Group(devices, ranks // devices)
