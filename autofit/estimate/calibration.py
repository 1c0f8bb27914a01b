"""Calibration: how far off predictions were on this device, cached per user and device.

Memory beyond tensors differs by driver and library (workspaces, fragments, kernels), speed by clock
and neighbours. So measurements are stored with their predictions, and later predictions are scaled
by the median ratio; their interval spans the ratios. A machine that others use is slow for as long:
step times weigh more the quieter the machine was and the steadier they are, less with age, no day
more than a few, and until such measurements outweigh it a prediction stands. Several devices are
told apart from one, by their number and by how they divide a training: what they exchange takes
other links, and other time, for each.
"""

import contextlib
import math
import statistics
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Self

from autofit.core.config import Config, Value
from autofit.core.files import cache_file, digest, read_cache, write_cache
from autofit.core.hardware import Hardware
from autofit.core.layout import divided_by
from autofit.core.measurement import Measurement
from autofit.core.plain import UNREADABLE, from_plain

_Figures = Mapping[Config, float]
MOST_STORED = 200  # of the measurements with the largest weights
_ENOUGH = 5  # measurements whose spread says more than the default interval
_DAY = 24 * 3600.0
_HALF_LIFE = 30 * _DAY  # drivers and libraries change within months
_UNDATED = 0.05  # weight of a measurement from before time and load were stored
# Share of the time that something waited for a processor at which a step time counts half.
_BUSY = 0.2
_UNSTEADY = 0.1  # relative width of the interval of a median step time at which it counts half
_OF_A_DAY = 4.0  # as many measurements count in full: a search verifies two to four configs
_AS_PREDICTED = 0.5  # weight of predictions being right: half of one full measurement
_LITTLE = 0.25  # weights below count as discounted


@dataclass(frozen=True)
class Comparison:
    """One prediction and its measurement.

    Attributes:
        predicted_bytes, measured_bytes: what the device gives for tensors.
        predicted_seconds, measured_seconds: of a step.
        when: seconds since the epoch.
        waiting: the share of the time that something waited for a processor meanwhile.
        noise: the width of the 95 % interval of the median step time, relative to it.
    """

    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    when: float | None = None
    waiting: float | None = None
    noise: float | None = None

    def weight(self, now: float) -> float:
        """The weight of its step time by load, noise and age, at most 1."""
        age = math.exp2(-max(now - (self.when or now), 0.0) / _HALF_LIFE)
        if self.when is None or self.waiting is None or self.noise is None:
            return _UNDATED * age

        by_load = 1 / (1 + (self.waiting / _BUSY) ** 2)
        by_both = by_load / (1 + (self.noise / _UNSTEADY) ** 2)
        return by_both * age

    @property
    def time_ratio(self) -> float | None:
        """Measured to predicted seconds of a step."""
        if not self.measured_seconds or not self.predicted_seconds:
            return None
        return self.measured_seconds / self.predicted_seconds


@dataclass(frozen=True)
class Calibration:
    """Factors of predictions for one device.

    Attributes:
        memory: of bytes.
        spread: the (lowest, highest) ratio relative to it; None with few measurements.
        seconds: of step times; None without measurements.
        count: the measurements that it rests on.
        discounted: those of them with little weight, as the machine was busy or they are old.
    """

    memory: float = 1.0
    spread: tuple[float, float] | None = None
    seconds: float | None = None
    count: int = 0
    discounted: int = 0

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], now: float | None = None) -> Self:
        """From all measurements of a device."""
        if now is None:
            now = time.time()

        ratios = [
            comparison.measured_bytes / comparison.predicted_bytes
            for comparison in comparisons
            if comparison.predicted_bytes
        ]
        middle = 1.0
        spread = None
        if ratios:
            middle = statistics.median(ratios)
        if len(ratios) >= _ENOUGH:
            spread = (min(ratios) / middle, max(ratios) / middle)

        discounted = sum(comparison.weight(now) < _LITTLE for comparison in comparisons)

        return cls(
            middle,
            spread,
            _time_ratio(comparisons, now),
            len(comparisons),
            discounted,
        )


def _time_ratio(comparisons: Sequence[Comparison], now: float) -> float | None:
    """The weighted median of the ratios and of one more, that predictions are right."""
    timed = [comparison for comparison in comparisons if comparison.time_ratio]
    if not timed:
        return None

    days = [comparison.when and comparison.when // _DAY for comparison in timed]  # in UTC
    on_day = Counter(days)
    ratios = [(1.0, _AS_PREDICTED)]
    for comparison, day in zip(timed, days, strict=True):
        weight = comparison.weight(now) * min(1.0, _OF_A_DAY / on_day[day])
        ratios.append((comparison.time_ratio or 1.0, weight))

    return _weighted_median(ratios)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight): the smallest value that has half of all weight up to it; between two,
    their mean."""
    ordered = sorted(values)
    below = list(accumulate(weight for _, weight in ordered))
    index = bisect_left(below, below[-1] / 2)
    value = ordered[index][0]
    if below[index] == below[-1] / 2:
        return (value + ordered[index + 1][0]) / 2

    return value


def compare(
    measured: Iterable[Measurement],
    nbytes: _Figures,
    seconds: _Figures,
    *,
    exact: bool,
    waiting: float,
) -> list[Comparison]:
    """Measurements with the predictions of their configs, where there are any.

    Args:
        nbytes, seconds: predicted.
        exact: the predicted bytes are, and nothing is learnt from them.
        waiting: the share of the time that something waited for a processor meanwhile.
    """
    comparisons = []
    for measurement in measured:
        config = measurement.config
        peak = measurement.peak_bytes
        step = measurement.step_seconds
        if not peak or not step or not math.isfinite(nbytes.get(config, math.nan)):
            continue

        comparison = Comparison(
            predicted_bytes=0 if exact else int(nbytes[config] or 0),
            measured_bytes=peak.allocated,
            predicted_seconds=seconds.get(config),
            measured_seconds=step.median,
            when=time.time(),
            waiting=waiting,
            noise=(step.high - step.low) / step.median,
        )

        comparisons.append(comparison)

    return comparisons


def calibration_for(hardware: Hardware, config: Mapping[str, Value] | None = None) -> Calibration:
    """The calibration of this device; of several, that of the ways in which this config divides a
    training."""
    return Calibration.of(_read(_path(hardware, config)))


def learn(
    hardware: Hardware,
    comparisons: Sequence[Comparison],
    config: Mapping[str, Value] | None = None,
) -> None:
    """Store measurements of this device, at most those with the largest weights; of several
    devices, of configs that divide a training as this one does."""
    path = _path(hardware, config)
    now = time.time()
    ordered = sorted(
        [*_read(path), *comparisons],
        key=lambda comparison: comparison.weight(now),
    )
    write_cache(path, [vars(comparison) for comparison in ordered[-MOST_STORED:]])


def _read(path: Path) -> list[Comparison]:
    """What earlier versions did not store is None, and what later ones add is ignored."""
    names = [field.name for field in fields(Comparison)]
    rows: tuple[Mapping[str, float | None], ...]
    rows = read_cache(path, tuple[Mapping[str, float | None], ...]) or ()

    comparisons = []
    for row in rows:
        known = {name: row[name] for name in names if name in row}
        with contextlib.suppress(*UNREADABLE):
            comparisons.append(from_plain(Comparison, known))

    return comparisons


def _path(hardware: Hardware, config: Mapping[str, Value] | None) -> Path:
    facts = f"{hardware.device} {hardware.measured_on or hardware.name}"
    if hardware.world > 1 and config is not None:
        divided = ", ".join(divided_by(config))
        facts += f" {hardware.devices} x {hardware.nodes} {hardware.link} {divided}"

    return cache_file("calibration", f"{digest(facts)}.json")
