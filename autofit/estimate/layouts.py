"""What predictions of a whole space trace of configs for several ranks: a few layouts stand for
all.

What a rank holds is a constant and a share of the weights, which falls with the number of shards:
two numbers of them tell all between. Replicas change nothing but what is exchanged, and each of the
ends of a block is traced alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.links import Links
from autofit.distributed.collectives import seconds
from autofit.estimate.overlap import redistributing
from autofit.estimate.ranks import group_of
from autofit.estimate.roofline import Speed
from autofit.estimate.scaling import Floats
from autofit.estimate.segments import Segment


def have_few_shards(configs: Iterable[Config]) -> bool:
    """Whether none of these configs lies between others in its number of shards: all may as well be
    traced."""
    shards: dict[tuple[int, int], set[int]] = {}
    for layout in {Layout.of(config) for config in configs}:
        shards.setdefault((layout.context, layout.tensor), set()).add(layout.shard)

    return all(len(sizes) <= 2 for sizes in shards.values())


def standing_for(
    config: Config,
    hardware: Hardware,
    *,
    few: bool = False,
) -> Sequence[tuple[Config, float]]:
    """The configs to trace for one, each with its share in what is predicted for it.

    A config of one device is traced itself.

    Args:
        few: there are few numbers of shards, so that each config is traced itself.
    """
    layout = Layout.of(config)
    if layout.world == 1:
        return [(config, 1.0)]

    alike = layout.context * layout.tensor
    fewest = 2 if alike == 1 else 1
    most = layout.world // alike
    if layout.shard * alike == 1:  # replicas alone
        return [(config.replace(**Layout(2, 1).knobs), 1.0)]
    if few or layout.shard in (fewest, most) or config.data_parallel != "fsdp":
        return [(config.replace(**replace(layout, replicate=1).knobs), 1.0)]

    share = (1 / fewest - 1 / layout.shard) / (1 / fewest - 1 / most)
    ends = (replace(layout, replicate=1, shard=shards).knobs for shards in (fewest, most))

    return [
        (config.replace(**end), part) for end, part in zip(ends, (1 - share, share), strict=True)
    ]


@dataclass(frozen=True)
class Exchanges:
    """What the ranks of a config exchange in a forward and backward, and how long that takes."""

    config: Config
    hardware: Hardware
    links: Links

    def seconds(
        self,
        segment: Segment,
        speed: Speed,
        *,
        last: bool,
    ) -> tuple[Floats, Floats, Floats]:
        """The seconds that a segment waits for others, and beside its computation those of weights
        that are gathered and of gradients that are reduced.

        Those of adapters and of replicas are averaged in the `last` micro-batch alone.
        """
        layout = Layout.of(self.config)
        shards = layout.shard * layout.context
        waited = gathered = reduced = averaged = np.zeros_like(segment.saved)
        for exchanged in segment.exchanged:
            if exchanged.waits:
                alike = (
                    (layout.context, layout.tensor)
                    if exchanged.kind == "all_to_all"
                    else (layout.tensor, 1)
                )
                waited = (
                    waited
                    + self._took(exchanged.kind, exchanged.nbytes, *alike)
                    + redistributing(speed)
                )
            elif exchanged.kind == "all_reduce":  # by ddp, in large buckets
                averaged = averaged + exchanged.nbytes
            elif exchanged.kind == "all_gather":
                gathered = gathered + self._took(
                    exchanged.kind,
                    exchanged.nbytes,
                    shards,
                    layout.tensor,
                )
            elif last or not self.config.lora_rank:
                reduced = reduced + self._took(
                    exchanged.kind,
                    exchanged.nbytes,
                    shards,
                    layout.tensor,
                )
                averaged = averaged + exchanged.nbytes / shards

        if last and layout.replicate > 1:
            took = self._took(
                "all_reduce",
                averaged,
                layout.replicate,
                shards * layout.tensor,
            )
            reduced = reduced + np.where(averaged > 0.0, took, 0.0)

        return waited, gathered, reduced

    def _took(
        self,
        kind: str,
        nbytes: Floats,
        ranks: int,
        stride: int,
    ) -> Floats:
        found: Floats = seconds(
            kind,
            nbytes,
            group_of(ranks, stride, self.hardware),
            self.links,
        )

        return found
