"""The Pareto front of memory and throughput, alternatives to the best config, and other budgets.

Points are measured or predicted and say which; a prediction replaces a measurement only where it is
noticeably better.
"""

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.measurement import Outcome
from autofit.core.plain import to_plain

MOST_POINTS = 20  # of a tier: enough to see its shape, and few enough to read


@dataclass(frozen=True)
class Point:
    """Memory and speed of a config, as measured or as predicted.

    `peak_bytes` counts against a budget: the device's, context included, and on a CPU that of
    tensors. Speeds compare with that of the best config: those of explored configs are brought to
    the level of verified runs.
    """

    config: Config
    peak_bytes: int
    samples_per_second: float
    tokens_per_second: float | None
    measured: bool


@dataclass(frozen=True)
class Alternative:
    """The best config with one knob changed, as measured or as predicted.

    The outcome of a prediction is `fits` or `out_of_memory`, and its figures are those in a larger
    budget. `peak_bytes` is as that of a Point; of a config measured to run out of memory it is what
    it had taken by then, None where that was no more than there is.
    """

    knob: str
    config: Config
    outcome: Outcome
    peak_bytes: int | None
    samples_per_second: float | None
    tokens_per_second: float | None
    measured: bool

    @property
    def value(self) -> Value:
        return self.config.get(self.knob)

    @property
    def fits(self) -> bool:
        return self.outcome is Outcome.FITS

    def to_dict(self) -> dict[str, Any]:
        """An element of `alternatives` in --json: the config is the best one but for the knob."""
        data = {"knob": self.knob, "value": self.value, **to_plain(self)}
        del data["config"]
        return data


@dataclass(frozen=True)
class OtherBudget:
    """A budget to compare with the one asked for: `why` in a few words, a `card` of that size."""

    why: str
    device_bytes: int
    card: str | None = None


def frontier(points: Iterable[Point], *, tolerance: float = 0.0) -> tuple[Point, ...]:
    """The points that none dominates: from each to the next more memory and more throughput.

    A predicted point is dropped, too, where a measured one is as good within the relative
    `tolerance` of throughput and of memory.
    """
    candidates = list(points)
    measured = _undominated(point for point in candidates if point.measured)

    needed = list(measured)
    for point in candidates:
        if not point.measured:
            rival = fastest_within(measured, point.peak_bytes * (1 + tolerance))
            speed = point.samples_per_second
            if rival is None or rival.samples_per_second * (1 + tolerance) < speed:
                needed.append(point)
    return _undominated(needed)


def fastest_within(points: Sequence[Point], nbytes: float) -> Point | None:
    """The fastest point of a frontier that needs no more memory; None where all need more."""
    fitting = bisect.bisect_right(points, nbytes, key=lambda point: point.peak_bytes)
    return points[fitting - 1] if fitting else None


def thinned(
    points: Sequence[Point],
    keep: Collection[Point] = (),
    most: int = MOST_POINTS,
) -> tuple[Point, ...]:
    """At most `most` points of a frontier: those that gain least over the one before are dropped.

    The first, the last and those of `keep` stay; predicted ones go first.
    """
    left = list(points)
    while len(left) > most:
        ranked = []
        for index in range(1, len(left) - 1):
            point = left[index]
            if point not in keep:
                gain = point.samples_per_second / left[index - 1].samples_per_second
                ranked.append((point.measured, gain, index))

        if not ranked:
            break
        _, _, least = min(ranked)
        del left[least]
    return tuple(left)


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    front: list[Point] = []
    for point in sorted(points, key=_least_memory_first):
        if not front or point.samples_per_second > front[-1].samples_per_second:
            front.append(point)
    return tuple(front)


def _least_memory_first(point: Point) -> tuple[int, float, bool]:
    return point.peak_bytes, -point.samples_per_second, not point.measured
