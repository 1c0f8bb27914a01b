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
_BUSY = (
    0.2  # share of the time that something waited for a processor at which a step time counts half
)
_UNSTEADY = 0.1  # relative width of the interval of a median step time at which it counts half
_OF_A_DAY = 4.0  # as many measurements count in full: a search verifies two to four configs
_AS_PREDICTED = 0.5  # weight of predictions being right: half of one full measurement
_LITTLE = 0.25  # weights below count as discounted


@dataclass(frozen=True)
class Comparison:
    """One prediction and its measurement: bytes the device gave for tensors, and seconds of a
    step."""

    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    when: float | None = None  # seconds since the epoch
    waiting: float | None = (
        None  # the share of the time that something waited for a processor meanwhile
    )
    noise: float | None = (
        None  # the width of the 95 % interval of the median step time, relative to it
    )

    def weight(self, now: float) -> float:
        """The weight of its step time by load, noise and age, at most 1."""
        age = math.exp2(-max(now - (self.when or now), 0.0) / _HALF_LIFE)
        if self.when is None or self.waiting is None or self.noise is None:
            return _UNDATED * age
        return 1 / (1 + (self.waiting / _BUSY) ** 2) / (1 + (self.noise / _UNSTEADY) ** 2) * age

    @property
    def time_ratio(self) -> float | None:
        """Measured to predicted seconds of a step."""
        measured, predicted = self.measured_seconds, self.predicted_seconds
        return measured / predicted if measured and predicted else None


@dataclass(frozen=True)
class Calibration:
    """Factors of predictions for one device."""

    memory: float = 1.0  # of bytes
    spread: tuple[float, float] | None = (
        None  # (lowest, highest) ratio relative to it; None with few measurements
    )
    seconds: float | None = None  # of step times; None without measurements
    count: int = 0  # measurements it rests on
    discounted: int = 0  # those of them with little weight, as the machine was busy or they are old

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], now: float | None = None) -> Self:
        """From all measurements of a device."""
        now = time.time() if now is None else now
        memory = [
            each.measured_bytes / each.predicted_bytes
            for each in comparisons
            if each.predicted_bytes
        ]
        middle = statistics.median(memory) if memory else 1.0
        spread = (min(memory) / middle, max(memory) / middle) if len(memory) >= _ENOUGH else None
        discounted = sum(comparison.weight(now) < _LITTLE for comparison in comparisons)
        return cls(middle, spread, _time_ratio(comparisons, now), len(comparisons), discounted)


def _time_ratio(comparisons: Sequence[Comparison], now: float) -> float | None:
    """The weighted median of the ratios and of one more, that predictions are right."""
    timed = [comparison for comparison in comparisons if comparison.time_ratio]
    days = [each.when and each.when // _DAY for each in timed]  # of the calendar, in UTC
    on_day = Counter(days)
    weights = [
        each.weight(now) * min(1.0, _OF_A_DAY / on_day[day])
        for each, day in zip(timed, days, strict=True)
    ]
    ratios = [(each.time_ratio or 1.0, weight) for each, weight in zip(timed, weights, strict=True)]
    return _weighted_median([*ratios, (1.0, _AS_PREDICTED)]) if timed else None


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight): the smallest value that has half of all weight up to it; between two,
    their mean."""
    ordered = sorted(values)
    below = list(accumulate(weight for _, weight in ordered))
    index = bisect_left(below, below[-1] / 2)
    value = ordered[index][0]
    return (value + ordered[index + 1][0]) / 2 if below[index] == below[-1] / 2 else value


def compare(
    measured: Iterable[Measurement],
    nbytes: _Figures,
    seconds: _Figures,
    *,
    exact: bool,
    waiting: float,
) -> list[Comparison]:
    """Measurements with the predictions of their configs, where there are any; nothing is learnt
    from predicted bytes that are `exact`. `waiting` is the share of the time that something waited
    for a processor meanwhile."""
    return [
        Comparison(
            predicted_bytes=0 if exact else int(nbytes[each.config] or 0),
            measured_bytes=each.peak_bytes.allocated,
            predicted_seconds=seconds.get(each.config),
            measured_seconds=each.step_seconds.median,
            when=time.time(),
            waiting=waiting,
            noise=(each.step_seconds.high - each.step_seconds.low) / each.step_seconds.median,
        )
        for each in measured
        if each.peak_bytes
        and each.step_seconds
        and math.isfinite(nbytes.get(each.config, math.nan))
    ]


def calibration_for(hardware: Hardware, config: Mapping[str, Value] | None = None) -> Calibration:
    """The calibration of this device; of several, that of the ways in which this config divides a
    training."""
    return Calibration.of(_read(_path(hardware, config)))


def learn(
    hardware: Hardware, comparisons: Sequence[Comparison], config: Mapping[str, Value] | None = None
) -> None:
    """Store measurements of this device, at most those with the largest weights; of several
    devices, of configs that divide a training as this one does."""
    path, now = _path(hardware, config), time.time()
    ordered = sorted([*_read(path), *comparisons], key=lambda comparison: comparison.weight(now))
    write_cache(path, [vars(each) for each in ordered[-MOST_STORED:]])


def _read(path: Path) -> list[Comparison]:
    """What earlier versions did not store is None, and what later ones add is ignored."""
    names = [field.name for field in fields(Comparison)]
    stored: tuple[Mapping[str, float | None], ...] = (
        read_cache(path, tuple[Mapping[str, float | None], ...]) or ()
    )
    comparisons = []
    for row in stored:
        known = {name: row[name] for name in names if name in row}
        with contextlib.suppress(*UNREADABLE):
            comparisons.append(from_plain(Comparison, known))
    return comparisons


def _path(hardware: Hardware, config: Mapping[str, Value] | None) -> Path:
    facts = f"{hardware.device} {hardware.measured_on or hardware.name}"
    if hardware.world > 1 and config is not None:
        facts += f" {hardware.devices} x {hardware.nodes} {hardware.link} {', '.join(divided_by(config))}"
    return cache_file("calibration", f"{digest(facts)}.json")
