"""Calibration: what probes on this device have shown predictions to be off by, kept per user and device.

A prediction counts tensors; a device has more that differs by driver and library (workspaces, fragments, kernels), and
is as fast as its clock and its neighbours let it be. So each real measurement is kept beside its prediction, and later
predictions are scaled by the median ratio and their interval spans the ratios seen.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.core.cache import cache_file, digest, keep
from autofit.core.hardware import Hardware

MOST_KEPT = 200  # of the latest measurements
_ENOUGH = 5  # measurements, from which on their spread says more than the interval assumed without any


@dataclass(frozen=True)
class Seen:
    """One prediction beside what was measured: bytes the device gave for tensors, and seconds of a step."""

    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float | None = None
    measured_seconds: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What predictions for one device are multiplied by.

    Attributes:
        memory: of bytes; `spread` is the (lowest, highest) ratio seen relative to it, None before enough was seen.
        seconds: of step times; None before any was seen.
        count: measurements it rests on.
    """

    memory: float = 1.0
    spread: tuple[float, float] | None = None
    seconds: float | None = None
    count: int = 0

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> Calibration:
        """From all measurements of a device."""
        memory = [each.measured_bytes / each.predicted_bytes for each in seen if each.predicted_bytes]
        times = [
            each.measured_seconds / each.predicted_seconds
            for each in seen
            if each.measured_seconds and each.predicted_seconds
        ]
        if not memory:
            return cls(seconds=statistics.median(times) if times else None, count=len(seen))
        middle = statistics.median(memory)
        spread = (min(memory) / middle, max(memory) / middle) if len(memory) >= _ENOUGH else None
        return cls(middle, spread, statistics.median(times) if times else None, len(seen))


def calibration_for(hardware: Hardware) -> Calibration:
    """What is known of this device."""
    return Calibration.of(_read(_path(hardware)))


def learn(hardware: Hardware, seen: Sequence[Seen]) -> None:
    """Keep measurements of this device."""
    path = _path(hardware)
    keep(path, json.dumps([vars(each) for each in [*_read(path), *seen][-MOST_KEPT:]]))


def _read(path: Path) -> list[Seen]:
    try:
        return [Seen(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):  # none yet, or of another version
        return []


def _path(hardware: Hardware) -> Path:
    return cache_file("calibration", f"{digest(f'{hardware.device} {hardware.measured_on or hardware.name}')}.json")
