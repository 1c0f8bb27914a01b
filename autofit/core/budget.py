"""Budget: how much memory a training run may use."""

import math
from dataclasses import dataclass, replace

from autofit.core.errors import InputError, shown
from autofit.core.hardware import GIB

MOST_GIB = 2**30  # an exbibyte, which no machine has
FREE_FRACTION = 0.8  # of free memory: the default budget of a CPU and of the host


@dataclass(frozen=True)
class Budget:
    """Device and host memory in bytes that may be used, and the fraction of the device left free.

    On CUDA `device_bytes` is the whole card that training must fit, context included. On CPU it
    bounds the tracked peak of tensor storage, which counts nothing else, so no margin is taken.
    """

    device_bytes: int
    host_bytes: int
    margin: float = 0.05

    def __post_init__(self) -> None:
        if self.device_bytes <= 0:
            message = f"a budget of {self.device_bytes} bytes holds nothing."
            raise InputError(message, "Give a positive number of GiB.")
        if not 0 <= self.margin < 1:
            message = f"the margin {self.margin} is not a fraction."
            raise InputError(message, "Give a number from 0 to below 1.")

    def cap_bytes(self, device: str, context_bytes: int = 0) -> int:
        """The limit on tensors: on a CPU the budget, else budget x (1 - margin) - context."""
        if device == "cpu":
            return self.device_bytes
        return int(self.device_bytes * (1 - self.margin)) - context_bytes

    def of_each(self, devices: int) -> "Budget":
        """The budget of each of several devices, which share the host's memory."""
        return replace(self, host_bytes=self.host_bytes // devices)

    def bytes_for(self, peak_bytes: int, device: str) -> int:
        """The smallest budget that a peak, context included, fits."""
        if device == "cpu":
            return peak_bytes
        return int(peak_bytes / (1 - self.margin))


def gib_to_bytes(gib: float | str, name: str = "the memory budget") -> int:
    """Bytes of a user's size in GiB; raises InputError for what is no positive, finite number."""
    example = "For example 24."
    try:
        if isinstance(gib, bool):
            raise TypeError
        number = float(gib)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} must be a number of GiB, not {shown(gib)}.", example) from error

    if not math.isfinite(number) or number <= 0:
        raise InputError(f"{name} must be more than 0 GiB, not {gib}.", example)
    if number > MOST_GIB:
        raise InputError(f"{name} must be at most {MOST_GIB:,} GiB, not {number:g}.", example)
    return int(number * GIB)
