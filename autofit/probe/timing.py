"""Step times: how many are enough, and the interval of their median."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from autofit.core.measurement import StepSeconds

_DISTURBED = 1.1  # of two steps that differ by so much one was disturbed, and a third tells which
_TREND_STEPS = 3  # that all later ones are slower than all earlier ones by chance: 1 in 20 for three against three


@dataclass(frozen=True)
class Plan:
    """How long a probe times steps.

    It stops once the median's interval is within `tightness` of the median, after at least `min_steps` and at most
    `max_steps` or `max_seconds`; or after two steps that are `hopeless` times slower than `best_seconds`. Two steps are
    enough only where `max_seconds` are over and both took much the same. `compose` allows step times composed of 4
    micro-batches and one update. The whole probe takes at most `seconds`, where the executor allows more.
    """

    min_steps: int = 3
    max_steps: int = 20
    max_seconds: float = 4.0
    tightness: float = 0.02
    best_seconds: float | None = None
    hopeless: float = 2.0
    compose: bool = True
    seconds: float = math.inf


def interval_of_median(samples: list[float]) -> StepSeconds:
    """The median and its 95 % interval from order statistics (distribution-free, by the binomial of signs). Below six
    samples no pair of order statistics covers 95 %; the whole range is given then."""
    ordered, count = sorted(samples), len(samples)
    tails = itertools.accumulate(math.comb(count, rank) / 2**count for rank in range(count // 2))
    rank = max((rank for rank, tail in enumerate(tails) if 1 - 2 * tail >= 0.95), default=0)
    return StepSeconds(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank])


def slowed_by(samples: list[float]) -> float:
    """By what share the last third of the steps took longer than the first; 0 where that may be noise. A warm device
    clocks down within a probe; a training runs at the speed of the later steps."""
    third = len(samples) // 3
    if third < _TREND_STEPS:
        return 0.0
    early, late = samples[:third], samples[-third:]
    return statistics.median(late) / statistics.median(early) - 1 if min(late) > max(early) else 0.0


def time_steps(
    step: Callable[[], float], plan: Plan, clock: Callable[[], float]
) -> tuple[list[float], bool]:
    """Call `step`, which returns its seconds, as the plan says; returns (samples, stopped as hopeless)."""
    samples: list[float] = []
    start = clock()
    while len(samples) < plan.max_steps:
        samples.append(step())
        if (
            plan.best_seconds
            and len(samples) == 2
            and min(samples) > plan.hopeless * plan.best_seconds
        ):
            return samples, True
        interval = interval_of_median(samples)
        tight = (
            len(samples) > 2
            and (interval.high - interval.low) / 2 <= plan.tightness * interval.median
        )
        settled = len(samples) != 2 or interval.high <= _DISTURBED * interval.low
        if len(samples) >= plan.min_steps and (
            tight or (settled and clock() - start >= plan.max_seconds)
        ):
            break
    return samples, False
