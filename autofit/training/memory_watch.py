"""Memory from step to step: what every report says of it, and warnings of leaks and fragmentation.

It is read between steps, where a training without leaks holds the same each time. Nothing waits for
the device: its allocator counts on the host. A CPU has no such counter, so there it is the
process's resident memory, with what its libraries and the loader keep.
"""

import gc
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autofit.core.hardware import GIB, MIB

# steps whose lowest reading is one floor: fast leaks, and slow ones in noisy readings
WINDOWS = (7, 56)
_FLOORS = 6  # in a row, each above the one before, and the last above all of the first window
# the least rise between two of them, as a share of the largest: what fills up, or jumps, is no leak
_EVEN = 0.5
_LEAST_RISE = 32 * 1024  # bytes a step
_WARM_STEPS = 2  # the first makes the optimizer's state
_FRAGMENTED = 1.25  # reserved memory, of the peak of tensors
_LOST = GIB  # and so much more than it
_PAGE = os.sysconf("SC_PAGE_SIZE")

_KINDS = {
    "allocated_bytes": "the memory of tensors",
    "resident_bytes": "the memory of this process",
}


@dataclass(frozen=True)
class StepMemory:
    """Bytes after a step, on a CUDA device and on the host; None where there is no such counter.

    Attributes:
        allocated_bytes: of tensors.
        reserved_bytes: by the caching allocator.
        peak_bytes: the most of `allocated_bytes` since the process began, or since the last reset.
        resident_bytes: of this process, all its libraries included.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    resident_bytes: int | None = None


def memory_now(device: torch.device) -> StepMemory:
    """What is held now, in some microseconds."""
    try:
        # called every step, so without a Path
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123
            resident = int(file.read(64).split()[1]) * _PAGE
    except OSError:
        resident = None

    stats: Any = None
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:
        return StepMemory(resident_bytes=resident)

    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return StepMemory(
        allocated_bytes=allocated["current"],
        reserved_bytes=reserved["current"],
        peak_bytes=allocated["peak"],
        resident_bytes=resident,
    )


class MemoryWatch:
    """Reads memory after every step, and warns of leaks and fragmentation.

    It warns once of each kind of memory that leaks, and once of fragmentation.
    """

    def __init__(self, device: torch.device, notify: Callable[[str], None]) -> None:
        self._device = device
        self._notify = notify
        self._steps = 0
        self._floors = {name: _floors() for name in _KINDS}
        self._is_fragmented = False

    def after(self, step: int) -> StepMemory:
        """The memory after a step."""
        memory = memory_now(self._device)
        self._steps += 1
        if self._steps <= _WARM_STEPS:
            return memory

        for name in tuple(self._floors):
            nbytes = getattr(memory, name)
            if nbytes is not None:
                self._check_for_leak(name, step, nbytes)

        if memory.reserved_bytes and memory.peak_bytes and not self._is_fragmented:
            self._check_for_gaps(memory.reserved_bytes, memory.peak_bytes)
        return memory

    def _check_for_leak(self, name: str, step: int, nbytes: int) -> None:
        """Add a reading of one kind of memory, and warn if it has been rising."""
        rises = [floors.add(step, nbytes) for floors in self._floors[name]]
        found = next(filter(None, rises), None)
        if found is None:
            return
        first, risen, steps = found

        gc.collect()  # what only waits for it is no leak
        freed = nbytes - (getattr(memory_now(self._device), name) or 0)
        if freed > risen / 2:
            self._floors[name] = _floors()
            return

        del self._floors[name]
        rate = f"{risen / steps / MIB:.2g} MiB a step"
        self._warn_of_leak(f"{_KINDS[name]} has been rising since step {first}, by {rate}")

    def _warn_of_leak(self, what: str) -> None:
        self._notify(
            f"{what}: something keeps what each step makes, often a loss or an output that is kept"
            " without .item() or .detach(), or a cache of the loader (docs/out-of-memory.md)."
        )

    def _check_for_gaps(self, reserved: int, peak: int) -> None:
        """Warn if the allocator holds much more than tensors have ever taken."""
        if reserved <= peak * _FRAGMENTED or reserved - peak <= _LOST:
            return

        self._is_fragmented = True
        self._notify(
            f"the allocator holds {reserved / GIB:.2f} GiB for tensors that never took more than"
            f" {peak / GIB:.2f}: its memory is fragmented. Segments that grow"
            " (expandable_segments:True) or batches of one shape help."
        )


class _Floors:
    """The lowest reading of each of the last windows of steps."""

    def __init__(self, window: int) -> None:
        self._window = window
        # (bytes, step) of the window that is not full yet
        self._readings: list[tuple[int, int]] = []
        # of the last full windows
        self._lowest: deque[tuple[int, int]] = deque(maxlen=_FLOORS)
        self._highest: deque[int] = deque(maxlen=_FLOORS)  # bytes

    def add(self, step: int, nbytes: int) -> tuple[int, int, int] | None:
        """Add a reading.

        Returns:
            Once all floors rise evenly, the step of the first of them, the bytes risen since, and
            the number of steps in which they did; before that None.
        """
        self._readings.append((nbytes, step))
        if len(self._readings) < self._window:
            return None

        self._lowest.append(min(self._readings))
        self._highest.append(max(self._readings)[0])
        self._readings.clear()
        if len(self._lowest) < _FLOORS:
            return None

        rises = [after - before for (before, _), (after, _) in pairwise(self._lowest)]
        if min(rises) < max(_LEAST_RISE * self._window, _EVEN * max(rises)):
            return None

        first, first_step = self._lowest[0]
        last, last_step = self._lowest[-1]
        if last < self._highest[0]:
            return None
        return first_step, last - first, max(1, last_step - first_step)


def _floors() -> list[_Floors]:
    """Those of all windows, without readings."""
    return list(map(_Floors, WINDOWS))
