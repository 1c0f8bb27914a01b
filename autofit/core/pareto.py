"""The frontier: the most throughput for each amount of memory, as data, and the rule of what belongs to it.

Search works out the points, a Result holds them, and reports ask what another budget would run. A point is measured or
predicted and says which; a guess takes the place of a fact only where it is noticeably better.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.measurement import Outcome

MOST_POINTS = 20  # of a tier: enough to see its shape, and short enough to read


@dataclass(frozen=True)
class Point:
    """What a config takes and gives, as measured or as predicted.

    `peak_bytes` is what is held against a budget: the device's, context included, and on a CPU that of tensors. Speeds
    compare with that of the best config: of what was only explored, they are brought to the level of verified runs.
    """

    config: Config
    peak_bytes: int
    samples_per_second: float
    tokens_per_second: float | None
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        """An element of `frontier` in --json."""
        return {**dataclasses.asdict(dataclasses.replace(self, config=Config())), "config": dict(self.config)}


@dataclass(frozen=True)
class Alternative:
    """The best config with one knob changed, and what came of it or is expected to.

    The outcome of what is only predicted is `fits` or `out_of_memory`, and its figures are what it would reach in a
    larger budget. `peak_bytes` is as that of a Point; of one that was measured and ran out of memory it is what it had
    taken by then, None where that was no more than there is.
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
        return self.config[self.knob]

    @property
    def fits(self) -> bool:
        return self.outcome is Outcome.FITS

    def to_dict(self) -> dict[str, Any]:
        """An element of `alternatives` in --json: the config is the best one but for the knob."""
        data = dataclasses.asdict(dataclasses.replace(self, config=Config()))
        del data["config"]
        return {"knob": data.pop("knob"), "value": self.value, **data, "outcome": self.outcome.value}


@dataclass(frozen=True)
class OtherBudget:
    """A budget that was not asked for and is worth a word; `why` says it in a few, `card` names one of that size."""

    why: str
    device_bytes: int
    card: str | None = None


def frontier(points: Iterable[Point], *, tolerance: float = 0.0) -> tuple[Point, ...]:
    """The points that none dominates: from each to the next more memory and more throughput.

    A predicted one is dropped, too, where a measured one is as good but for less than the share `tolerance` of its
    throughput and its memory.
    """
    every = list(points)
    facts = _undominated(point for point in every if point.measured)
    return _undominated(point for point in every if point.measured or not _as_good(facts, point, tolerance))


def fastest_within(points: Sequence[Point], nbytes: float) -> Point | None:
    """The point of a frontier that is the fastest of those that need no more; None where all need more."""
    place = bisect.bisect_right(points, nbytes, key=lambda point: point.peak_bytes)
    return points[place - 1] if place else None


def thinned(points: Sequence[Point], keep: Collection[Point] = (), most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most so many points of a frontier, without those that are the least faster than the one before.

    The first, the last and those to keep stay; measured ones go last.
    """
    left = list(points)
    while len(left) > most:
        inner = [place for place in range(1, len(left) - 1) if left[place] not in keep]
        if not inner:
            break
        predicted = [place for place in inner if not left[place].measured]
        del left[min(predicted or inner, key=lambda place: _gain(left[place - 1], left[place]))]
    return tuple(left)


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak_bytes, -each.samples_per_second, not each.measured)):
        if not found or point.samples_per_second > found[-1].samples_per_second:
            found.append(point)
    return tuple(found)


def _as_good(facts: Sequence[Point], point: Point, tolerance: float) -> bool:
    """Whether a point of a frontier is as good as another one, but for the tolerance."""
    best = fastest_within(facts, point.peak_bytes * (1 + tolerance))
    return best is not None and best.samples_per_second * (1 + tolerance) >= point.samples_per_second


def _gain(before: Point, after: Point) -> float:
    return after.samples_per_second / before.samples_per_second
