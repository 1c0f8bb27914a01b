"""How long a step takes on several devices that train in parallel data, from the trace of one of them.

Each block gathers its weights before it computes and reduces its gradients after; what a rank computes is what one
device would, but for its share of the update and the copies in and out of what is exchanged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.links import Links
from autofit.distributed.collectives import Group, seconds
from autofit.estimate.overlap import Unit, micro_batch
from autofit.estimate.ranks import group_of
from autofit.estimate.rates import Rates
from autofit.estimate.roofline import Speed
from autofit.estimate.trace import Span, Trace

_MIXED = ("bf16-mixed", "fp16-mixed")  # what is gathered of them has half the bytes of the weights


@dataclass(frozen=True)
class Exchange:
    """How the ranks of a layout exchange weights and gradients, over the links of some hardware."""

    layout: Layout
    hardware: Hardware
    links: Links
    kind: str  # "ddp" or "fsdp"

    def gather(self, nbytes: float) -> float:
        """Seconds until weights of so many bytes are whole."""
        return float(seconds("all_gather", nbytes, self._shards, self.links)) if self.kind == "fsdp" else 0.0

    def reduce(self, nbytes: float) -> float:
        """Seconds until gradients of so many bytes are averaged."""
        if self.kind == "ddp":
            return float(seconds("all_reduce", nbytes, group_of(self.layout.world, 1, self.hardware), self.links))
        across = seconds("all_reduce", nbytes / self._shards.size, self._replicas, self.links)
        return float(seconds("reduce_scatter", nbytes, self._shards, self.links) + across)

    @property
    def _shards(self) -> Group:
        layout = self.layout
        return group_of(layout.shard * layout.context, layout.tensor, self.hardware)

    @property
    def _replicas(self) -> Group:
        layout = self.layout
        return group_of(layout.replicate, layout.shard * layout.context * layout.tensor, self.hardware)


@dataclass(frozen=True)
class _Weights:
    """Bytes of the weights of a block, by what is done with them; of the model's ends, half of theirs."""

    gathered: float
    reduced: float

    @classmethod
    def of(cls, traced: Trace, block: int | None) -> Self:
        sizes: dict[int, int] = {}
        for event in traced.events:
            sizes.setdefault(event.storage, event.nbytes)
        mine = Counter[bool]()
        for storage, label in traced.labels.items():
            if label == "parameters" and traced.owners.get(storage) == block:
                mine[storage in traced.trained] += sizes.get(storage, 0)
        narrow = 0.5 if traced.config["precision"] in _MIXED else 1.0
        share = 0.5 if block is None else 1.0
        return cls((mine[False] + narrow * mine[True]) * share, mine[True] * share)


def sharded_seconds(traced: Trace, rates: Rates, exchange: Exchange, update: float) -> float:
    """The seconds of an optimizer step. `update`: of one device that steps all weights."""
    config: Mapping[str, Any] = traced.config
    passes = micro_batch(_units(traced, Speed.of(rates, exchange.hardware, config), exchange))
    shards = exchange.layout.shard * exchange.layout.context if exchange.kind == "fsdp" else 1
    return float(int(config["gradient_accumulation_steps"] or 1) * passes + update / shards)


def _units(traced: Trace, speed: Speed, exchange: Exchange) -> list[Unit]:
    """The model's beginning, its blocks, and its end."""
    blocks = sorted({mark.block for mark, _ in traced.spans("forward") if mark.block is not None})
    ends = [mark for mark, _ in traced.spans("forward") if mark.block is None]
    units = []
    for number, block in enumerate([None, *blocks, None]):
        spans = [span for span in traced.spans("forward") if span[0].block == block]
        if block is None:  # the first span of no block is the beginning, all others are the end
            spans = [span for span in spans if (span[0] is ends[0]) == (number == 0)]
        behind = [] if number == 0 else [span for span in traced.spans("backward") if span[0].block == block]
        weights = _Weights.of(traced, block)
        unit = Unit(
            forward=_computing(traced, spans, speed, exchange, weights.gathered),
            backward=_computing(traced, behind, speed, exchange, weights.gathered + weights.reduced),
            gather=exchange.gather(weights.gathered),
            again=exchange.gather(weights.gathered) if block is not None else 0.0,
            reduce=exchange.reduce(weights.reduced) if weights.reduced else 0.0,
        )
        units += [unit] * (traced.depth.times(block) if traced.depth else 1)
    return units


def _computing(traced: Trace, spans: Sequence[Span], speed: Speed, exchange: Exchange, exchanged: float) -> float:
    """Tokens of a context group are computed by its ranks in equal parts. What is exchanged is copied in or out of
    buffers; autocast's copies of the weights, which one device makes, stand for those where precisions are mixed."""
    computed = sum(traced.waits(spans, speed).values()) / exchange.layout.context
    copied = exchange.kind == "fsdp" and traced.config["precision"] not in _MIXED
    return computed + copied * 2 * exchanged / speed.rates.bandwidth
