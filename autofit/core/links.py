"""Links: how fast the devices of a node exchange data, and nodes among each other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A kind of link, or one that was measured."""

    title: str
    bandwidth: float  # bytes a second that one device sends in a large collective
    latency: float  # seconds of one hop
    shared: bool = False  # by the devices of a node


@dataclass(frozen=True)
class Links:
    """The links of a training: within a node, and between nodes."""

    within: Link
    between: Link
