"""Calibration: what probes on this device have shown predictions to be off by, kept per user and device.

A prediction counts tensors; a device has more that differs by driver and library (workspaces, fragments, kernels), and
is as fast as its clock and its neighbours let it be. So each real measurement is kept beside its prediction, and later
predictions are scaled by the median ratio and their interval spans the ratios seen.

A machine that others use is slow for as long as they use it. So step times count by how quiet the machine was and how
steady they were, all times less with age, no day for more than a few, and until such measurements outweigh it, what was
predicted stands.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autofit.core.config import Config
from autofit.core.files import cache_file, digest, write_cache
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement

MOST_KEPT = 200  # of the measurements that count most
_ENOUGH = 5  # measurements, from which on their spread says more than the interval assumed without any

_DAY = 24 * 3600.0
_HALF_LIFE = 30 * _DAY  # drivers and libraries change within months
_UNTOLD = 0.05  # what a measurement counts that was kept before it was noted when, and how busy the machine was
_BUSY = 0.2  # share of the time that something waited for a processor, at which a step time counts half
_UNSTEADY = 0.1  # width of the interval of a median step time, relative to it, at which it counts half
_OF_A_DAY = 4.0  # as many measurements count in full: a search verifies two to four configs
_AS_PREDICTED = 0.5  # what it counts that predictions are right: half of one measurement in full
_LITTLE = 0.25  # what counts less is told apart


@dataclass(frozen=True)
class Seen:
    """One prediction beside what was measured: bytes the device gave for tensors, and seconds of a step.

    Attributes:
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

    def quality(self) -> float:
        """What its step time counts for, by how quiet the machine was and how steady the steps; 1 at the most."""
        if self.when is None or self.waiting is None or self.noise is None:
            return _UNTOLD
        return 1 / (1 + (self.waiting / _BUSY) ** 2) / (1 + (self.noise / _UNSTEADY) ** 2)

    def weight(self, now: float) -> float:
        """The same, and by its age."""
        return self.quality() * math.exp2(-max(now - (self.when or now), 0.0) / _HALF_LIFE)

    @property
    def day(self) -> int | None:
        """Of the calendar, in UTC."""
        return None if self.when is None else int(self.when // _DAY)

    @property
    def memory_ratio(self) -> float | None:
        """How many times the predicted bytes were needed."""
        return self.measured_bytes / self.predicted_bytes if self.predicted_bytes else None

    @property
    def time_ratio(self) -> float | None:
        """How many times the predicted seconds a step took."""
        measured, predicted = self.measured_seconds, self.predicted_seconds
        return measured / predicted if measured and predicted else None


@dataclass(frozen=True)
class Calibration:
    """What predictions for one device are multiplied by.

    Attributes:
        memory: of bytes; `spread` is the (lowest, highest) ratio seen relative to it, None before enough was seen.
        seconds: of step times; None before any was seen.
        count: measurements it rests on.
        discounted: those of them whose step time counts little, for the machine was busy or it is long ago.
    """

    memory: float = 1.0
    spread: tuple[float, float] | None = None
    seconds: float | None = None
    count: int = 0
    discounted: int = 0

    @classmethod
    def of(cls, seen: Sequence[Seen], now: float | None = None) -> Calibration:
        """From all measurements of a device."""
        now = time.time() if now is None else now
        memory = [ratio for each in seen if (ratio := each.memory_ratio)]
        middle = statistics.median(memory) if memory else 1.0
        spread = (min(memory) / middle, max(memory) / middle) if len(memory) >= _ENOUGH else None
        discounted = sum(each.weight(now) < _LITTLE for each in seen)
        return cls(middle, spread, _time_ratio(seen, now), len(seen), discounted)


def _time_ratio(seen: Sequence[Seen], now: float) -> float | None:
    """The median of the ratios, each with its weight, and that predictions are right as one more."""
    timed = [each for each in seen if each.time_ratio]
    on_day = Counter(each.day for each in timed)
    ratios = [(each.time_ratio or 1.0, each.weight(now) * min(1.0, _OF_A_DAY / on_day[each.day])) for each in timed]
    return _weighted_median([*ratios, (1.0, _AS_PREDICTED)]) if timed else None


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight): the least at which those up to it have half of all weight; between two, their middle."""
    ordered = sorted(values)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if below > half or place == len(ordered) - 1:
            return value
        if below == half:
            return (value + ordered[place + 1][0]) / 2
    raise AssertionError("a median of nothing")


def compared(
    measured: Iterable[Measurement],
    nbytes: Mapping[Config, float],
    seconds: Mapping[Config, float],
    *,
    exact: bool,
    waiting: float,
) -> list[Seen]:
    """Measurements beside what was predicted of their configs, where anything was.

    Args:
        exact: the predicted bytes are, so that nothing is to be learnt of them.
        waiting: the share of the time that something waited for a processor while they were made.
    """
    return [
        Seen(
            predicted_bytes=0 if exact else int(nbytes[each.config] or 0),
            measured_bytes=each.peak_bytes.allocated,
            predicted_seconds=seconds.get(each.config),
            measured_seconds=each.step_seconds.median,
            when=time.time(),
            waiting=waiting,
            noise=(each.step_seconds.high - each.step_seconds.low) / each.step_seconds.median,
        )
        for each in measured
        if each.peak_bytes and each.step_seconds and math.isfinite(nbytes.get(each.config, math.nan))
    ]


def calibration_for(hardware: Hardware) -> Calibration:
    """What is known of this device."""
    return Calibration.of(_read(_path(hardware)))


def learn(hardware: Hardware, seen: Sequence[Seen]) -> None:
    """Keep measurements of this device; of more than there is room for, those that count most."""
    path, now = _path(hardware), time.time()
    known = sorted([*_read(path), *seen], key=lambda each: each.weight(now))
    write_cache(path, json.dumps([vars(each) for each in known[-MOST_KEPT:]]))


def _read(path: Path) -> list[Seen]:
    try:
        return [_seen(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):  # none yet, or of another version
        return []


def _seen(data: Mapping[str, Any]) -> Seen:
    """What earlier versions did not note is None, and what later ones do is left out."""
    return Seen(**{each.name: data[each.name] for each in fields(Seen) if each.name in data})


def _path(hardware: Hardware) -> Path:
    return cache_file("calibration", f"{digest(f'{hardware.device} {hardware.measured_on or hardware.name}')}.json")
