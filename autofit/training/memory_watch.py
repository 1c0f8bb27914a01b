"""Memory from step to step: what every report says of it, and warnings of slow leaks and of fragmentation.

Read between steps, where a training without leaks holds the same each time. Nothing waits for the device: its allocator
counts on the host. A CPU has no such counter, so there it is the process's resident memory, with what its libraries and
the loader keep.
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
_EVEN = 0.5  # the least rise between two of them, as a share of the largest: what fills up, or jumps, is no leak
_LEAST_RISE = 32 * 1024  # bytes a step
_WARM_STEPS = 2  # the first makes the optimizer's state
_FRAGMENTED = 1.25  # reserved memory, of the peak of tensors
_LOST = GIB  # and so much more than it
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class StepMemory:
    """Bytes after a step, on a CUDA device and in the host's memory; None where there is no such counter.

    `allocated`: of tensors; `reserved`: by the caching allocator; `peak`: most of `allocated` since the process began,
    or since it was last reset. `resident`: of this process, all its libraries included.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    resident_bytes: int | None = None


def memory_now(device: torch.device) -> StepMemory:
    """What is held now, in some microseconds."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - called every step
            resident = int(file.read(64).split()[1]) * _PAGE
    except OSError:
        resident = None
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else None
    if not stats:
        return StepMemory(resident_bytes=resident)
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return StepMemory(allocated["current"], reserved["current"], allocated["peak"], resident)


class MemoryWatch:
    """Reads memory after every step, and warns once of each kind of memory that leaks, and once of fragmentation."""

    def __init__(self, device: torch.device, notify: Callable[[str], None]) -> None:
        self._device = device
        self._notify = notify
        self._steps = 0
        self._floors = {name: [_Floors(window) for window in WINDOWS] for name in _KINDS}
        self._is_fragmented = False

    def after(self, step: int) -> StepMemory:
        """The memory after a step."""
        memory = memory_now(self._device)
        self._steps += 1
        if self._steps > _WARM_STEPS:
            for name in tuple(self._floors):
                self._look(name, step, getattr(memory, name))
            if memory.reserved_bytes and memory.peak_bytes and not self._is_fragmented:
                self._look_for_gaps(memory.reserved_bytes, memory.peak_bytes)
        return memory

    def _look(self, name: str, step: int, nbytes: int | None) -> None:
        found = [
            rise
            for floors in self._floors[name]
            if nbytes is not None and (rise := floors.add(step, nbytes))
        ]
        if not found:
            return
        first, risen, steps = found[0]
        gc.collect()  # what only waits for it is no leak
        freed = (nbytes or 0) - (getattr(memory_now(self._device), name) or 0)
        if freed > risen / 2:
            self._floors[name] = [_Floors(window) for window in WINDOWS]
            return
        del self._floors[name]
        self._warn_of_leak(
            f"{_KINDS[name]} has been rising since step {first}, by {risen / steps / MIB:.2g} MiB a step"
        )

    def _warn_of_leak(self, what: str) -> None:
        kept = "a loss or an output that is kept without .item() or .detach(), or a cache of the loader"
        self._notify(
            f"{what}: something keeps what each step makes, often {kept} (docs/out-of-memory.md)."
        )

    def _look_for_gaps(self, reserved: int, peak: int) -> None:
        if reserved > peak * _FRAGMENTED and reserved - peak > _LOST:
            self._is_fragmented = True
            self._notify(
                f"the allocator holds {reserved / GIB:.2f} GiB for tensors that never took more than {peak / GIB:.2f}:"
                " its memory is fragmented. Segments that grow (expandable_segments:True) or batches of one shape help."
            )


_KINDS = {
    "allocated_bytes": "the memory of tensors",
    "resident_bytes": "the memory of this process",
}


class _Floors:
    """The lowest reading of each of the last windows of steps."""

    def __init__(self, window: int) -> None:
        self._window = window
        # (bytes, step) of the window that is not full yet
        self._readings: list[tuple[int, int]] = []
        # lowest and highest
        self._ends: deque[tuple[tuple[int, int], tuple[int, int]]] = deque(maxlen=_FLOORS)

    def add(self, step: int, nbytes: int) -> tuple[int, int, int] | None:
        """(the step of the first floor, bytes risen since, in so many steps) once all floors rise evenly."""
        self._readings.append((nbytes, step))
        if len(self._readings) < self._window:
            return None
        self._ends.append((min(self._readings), max(self._readings)))
        self._readings.clear()
        if len(self._ends) < _FLOORS:
            return None
        floors = [lowest for (lowest, _), _ in self._ends]
        rises = [after - before for before, after in pairwise(floors)]
        _, (noisiest, _) = self._ends[0]
        if (
            min(rises) < max(_LEAST_RISE * self._window, _EVEN * max(rises))
            or floors[-1] < noisiest
        ):
            return None
        ((_, first), _) = self._ends[0]
        ((_, last), _) = self._ends[-1]
        return first, floors[-1] - floors[0], max(1, last - first)
