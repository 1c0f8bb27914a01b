"""CPU contention: the share of time in which some task waited for a processor. Steps on a busy
machine are slow.

Linux counts it (`/proc/pressure/cpu`, "some"). Elsewhere the last minute's load beyond the number
of processors stands for it.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
_MICROSECONDS = 1e6


class Contention:
    """Counts from its creation on."""

    def __init__(
        self, pressure: Path = _PRESSURE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pressure = pressure
        self._clock = clock
        self._start = clock()
        self._waited_before = self._seconds_waited()

    def share(self) -> float:
        """The share of the time so far, between 0 and 1."""
        waited = self._seconds_waited()
        took = self._clock() - self._start
        if waited is None or self._waited_before is None or took <= 0:
            load, *_ = os.getloadavg()
            processors = os.cpu_count() or 1
            return max(load - processors, 0.0) / max(load, 1.0)

        return min(max((waited - self._waited_before) / took, 0.0), 1.0)

    def _seconds_waited(self) -> float | None:
        """Since the machine was started; None where the system does not count them."""
        try:
            text = self._pressure.read_text(encoding="ascii")
        except OSError:
            return None

        found = re.search(r"^some .*total=(\d+)", text, re.MULTILINE)
        return int(found[1]) / _MICROSECONDS if found else None
