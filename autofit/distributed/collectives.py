"""What collectives cost: seconds by bytes, the ranks of a group and their links.

The alpha-beta model of rings (Thakur et al. 2005, doi 10.1177/1094342005051521), as NCCL runs them:
through each node once for each card in it, so that cards with networks of their own add up between
nodes. Bytes may be arrays.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.core.links import Links

Numbers = Any  # one or an array of them
# Seconds of any collective before its first hop: NCCL's tuning.cc, the ring of its Simple protocol
# (8.4e-6), and its kernel's launch.
_START = 15e-6
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data: so many devices on each of so many nodes."""

    devices: int
    nodes: int = 1

    @property
    def size(self) -> int:
        return self.devices * self.nodes


def seconds(kind: str, nbytes: Numbers, group: Group, links: Links) -> Numbers:
    """The time of one collective.

    Args:
        nbytes: of the whole tensor that is gathered, scattered, reduced or sent; of what one rank
            gives where it is all-to-all.
    """
    size = group.size
    nodes = group.nodes
    within = links.within
    between = links.between
    moved = nbytes * (size - 1) / size
    if kind == "send":
        moved = nbytes
    if size == 1:
        return 0.0 * moved

    # Of a node's ring each card's own network carries a part.
    network = between.bandwidth
    if not between.shared:
        network *= group.devices
    slowest = math.inf
    if group.devices > 1:
        slowest = within.bandwidth
    if nodes > 1:
        slowest = min(slowest, network)

    # Each hop goes from one rank to the next.
    hops = (size - nodes) * within.latency + (nodes - 1) * between.latency

    if kind == "all_to_all":  # with each other rank at once: most of it leaves the node
        inside = nbytes * (group.devices - 1) / size / within.bandwidth
        outside = nbytes * (size - group.devices) / size / (network / group.devices)
        return _START + hops + np.maximum(inside, outside)

    if kind == "all_reduce":  # a reduction and a gathering; nodes form a tree where that is shorter
        tree = (group.devices - 1) * within.latency + math.ceil(math.log2(nodes)) * between.latency
        return _START + 2 * min(hops, tree) + 2 * moved / slowest

    return _START + hops + moved / slowest
