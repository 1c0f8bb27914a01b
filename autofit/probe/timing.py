"""Step times: which are timed, how many are enough, and the interval of their median."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from autofit.core.measurement import StepSeconds

# Micro-batches that are timed, with an update, where a step is composed of its parts.
COMPOSED_MICRO_BATCHES = 4
_ADDS_UP = 0.05  # parts that differ more from a whole step do not stand for it
_DISTURBED = 1.1  # of two steps that differ by so much one was disturbed, and a third tells which
# By chance, three later steps are all slower than three earlier ones once in 20.
_TREND_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """How long a probe times steps.

    It stops once the median's interval is within `tightness` of the median, after at least
    `min_steps` and at most `max_steps` or `max_seconds`; or after two steps that are `hopeless`
    times slower than `best_seconds`. Two steps are enough only where `max_seconds` are over and
    both took much the same.

    Attributes:
        compose: step times are composed of 4 micro-batches and one update.
        long_seconds: of steps that run longer than this half of `min_steps` are enough, and where
            none is composed, those after the first are.
        seconds: that the whole probe takes at most, where the executor allows more.
    """

    min_steps: int = 3
    max_steps: int = 20
    max_seconds: float = 4.0
    tightness: float = 0.02
    best_seconds: float | None = None
    hopeless: float = 2.0
    compose: bool = True
    long_seconds: float = math.inf
    seconds: float = math.inf


class Stepper:
    """Runs a step, whole or by its parts, and returns its seconds.

    Args:
        whole: runs a whole step and returns its seconds.
        by_parts: the same of a few micro-batches and an update, scaled up; None where a step has no
            more of them.

    Attributes:
        composed: whether any step was composed of its parts.
    """

    def __init__(
        self, plan: Plan, whole: Callable[[], float], by_parts: Callable[[], float] | None
    ) -> None:
        self.composed = False
        self._plan = plan
        self._whole = whole
        self._by_parts = by_parts
        self._first: float | None = None  # seconds of the first whole step

    def __call__(self) -> float:
        if self._by_parts and self._plan.compose:
            self.composed = True
            return self._by_parts()

        if self._by_parts and self._first and self._first > self._plan.long_seconds:
            seconds = self._by_parts()
            if abs(seconds - self._first) <= _ADDS_UP * self._first:
                self.composed = True
                return seconds
            self._by_parts = None

        seconds = self._whole()
        self._first = self._first or seconds
        return seconds


def interval_of_median(samples: list[float]) -> StepSeconds:
    """The median and its 95 % interval from order statistics.

    It is free of distributions, by the binomial of signs. Below six samples no pair of order
    statistics covers 95 %; the whole range is given then.
    """
    ordered = sorted(samples)
    count = len(samples)

    narrowest = 0
    tail = 0.0
    for rank in range(count // 2):
        tail += math.comb(count, rank) / 2**count
        if 1 - 2 * tail >= 0.95:
            narrowest = rank

    low = ordered[narrowest]
    high = ordered[count - 1 - narrowest]
    return StepSeconds(statistics.median(ordered), low, high)


def slowed_by(samples: list[float]) -> float:
    """By what share the last third of the steps took longer than the first; 0 where that may be
    noise.

    A warm device clocks down within a probe; a training runs at the speed of the later steps.
    """
    third = len(samples) // 3
    if third < _TREND_STEPS:
        return 0.0

    early = samples[:third]
    late = samples[-third:]
    if min(late) <= max(early):
        return 0.0
    return statistics.median(late) / statistics.median(early) - 1


def time_steps(
    step: Callable[[], float], plan: Plan, clock: Callable[[], float]
) -> tuple[list[float], bool]:
    """Time steps as the plan says.

    Args:
        step: runs one and returns its seconds.
        clock: the seconds that count for the plan.

    Returns:
        The samples, and whether it stopped as hopeless.
    """
    samples: list[float] = []
    start = clock()
    while len(samples) < plan.max_steps:
        samples.append(step())
        count = len(samples)

        if plan.best_seconds and count == 2 and min(samples) > plan.hopeless * plan.best_seconds:
            return samples, True
        enough = plan.min_steps
        if clock() - start > count * plan.long_seconds:
            enough = (enough + 1) // 2
        if count < enough:
            continue

        interval = interval_of_median(samples)
        half = (interval.high - interval.low) / 2
        if count > 2 and half <= plan.tightness * interval.median:
            break

        is_settled = count != 2 or interval.high <= _DISTURBED * interval.low
        if is_settled and clock() - start >= plan.max_seconds:
            break
    return samples, False
