"""How long a step of one of several ranks takes, from the trace of it: what it computes, and what it exchanges beside.

What FSDP2 and DDP exchange overlaps with computation; layers and tokens that are split wait for theirs.
"""

from collections.abc import Iterable, Sequence

from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.links import Links
from autofit.distributed.collectives import Group, seconds
from autofit.estimate.overlap import Unit, micro_batch
from autofit.estimate.recorder import Collective
from autofit.estimate.roofline import Speed
from autofit.estimate.trace import Span, Trace


def step_seconds(traced: Trace, speed: Speed, hardware: Hardware, links: Links) -> float:
    """The seconds of all micro-batches of a step. The traced one is the last, after which gradients of replicas and of
    adapters are averaged; other shards are reduced in each."""
    exchanges = _Exchanges(traced, speed, hardware, links)
    layout, adapters = Layout.of(traced.config), bool(traced.config["lora_rank"])
    earlier = int(traced.config["gradient_accumulation_steps"] or 1) - 1
    reduced = () if adapters or layout.shard * layout.context == 1 else ("reduce_scatter",)
    last = micro_batch(exchanges.units(("reduce_scatter", "all_reduce")))
    return float(last + (earlier * micro_batch(exchanges.units(reduced)) if earlier else 0.0))


class _Exchanges:
    def __init__(self, traced: Trace, speed: Speed, hardware: Hardware, links: Links) -> None:
        self._traced, self._speed, self._hardware, self._links = traced, speed, hardware, links

    def units(self, reduced: Sequence[str]) -> list[Unit]:
        """The model's beginning, its blocks, and its end; `reduced`: the collectives that gradients take part in."""
        forward, backward = self._traced.spans("forward"), self._traced.spans("backward")
        beginning, end = forward[:1], [span for span in forward[1:] if span[0].block is None]
        blocks = sorted({mark.block for mark, _ in forward if mark.block is not None})
        behind = [span for span in backward if span[0].block is None]
        units = [self._unit(beginning, (), reduced)]
        for block in blocks:
            own, back = ([span for span in part if span[0].block == block] for part in (forward, backward))
            units += [self._unit(own, back, reduced)] * (self._traced.depth.times(block) if self._traced.depth else 1)
        return [*units, self._unit(end, behind, reduced)]

    def _unit(self, forward: Sequence[Span], backward: Sequence[Span], reduced: Sequence[str]) -> Unit:
        return Unit(
            forward=self._computing(forward),
            backward=self._computing(backward),
            gather=self._exchanging(self._beside(forward, ("all_gather",))),
            again=self._exchanging(self._beside(backward, ("all_gather",))),
            reduce=self._exchanging(self._beside(backward, reduced)),
        )

    def _computing(self, spans: Sequence[Span]) -> float:
        waited_for = (each for each in self._of(spans) if each.waits)
        return sum(self._traced.waits(spans, self._speed).values()) + self._exchanging(waited_for)

    def _beside(self, spans: Sequence[Span], kinds: Sequence[str]) -> Iterable[Collective]:
        return (each for each in self._of(spans) if not each.waits and each.kind in kinds)

    def _of(self, spans: Sequence[Span]) -> list[Collective]:
        found = self._traced.collectives
        return [each for mark, after in spans for each in found if mark.events <= each.event < after.events]

    def _exchanging(self, collectives: Iterable[Collective]) -> float:
        groups = ((each, group_of(each.ranks, each.stride, self._hardware)) for each in collectives)
        return sum(float(seconds(each.kind, each.nbytes, group, self._links)) for each, group in groups)


def groups_of(traced: Trace) -> int:
    """How many groups of ranks exchange something."""
    return len({(each.ranks, each.stride) for each in traced.collectives})


def group_of(ranks: int, stride: int, hardware: Hardware) -> Group:
    """So many ranks, each so far from the next one in the order of ranks, in which nodes are filled."""
    devices = min(ranks, max(1, hardware.devices // stride))
    return Group(devices, ranks // devices)
