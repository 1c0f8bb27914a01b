"""What a search may use of a machine: what the user allows, held against what is there and what others hold of it.

A request up to the size a card is sold as means the card: no card of 24 GB has 24 GiB. What others hold cannot be had,
so a budget is at most what is free: the driver is never run out, and what runs out of memory had all of its budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.hardware.catalogue import sold_bytes
from autofit.hardware.device import END_OTHERS

FREE_FRACTION = 0.8  # of free memory: the default budget of the CPU and of the host
_STEP = GIB // 4  # what is free is rounded down to: a little more held by a display tomorrow is no other budget


def budget_for(options: SearchOptions, hardware: Hardware, started_with: int | None = None) -> Budget:
    """What the user allows, checked against what the hardware has.

    Args:
        started_with: the bytes of the device that a search has had until now. It goes on with them, whatever is free
            today: what ran out of less memory would prove nothing of more.

    Raises:
        InputError: more than the machine has; ProbeError: a card of which nothing is free.
    """
    host_bytes = int(hardware.host_free_bytes * FREE_FRACTION)
    if options.host_mem is not None:
        host_bytes = gib_to_bytes(options.host_mem)
        if host_bytes > hardware.host_memory_bytes:
            has = f"this machine has {_gib(hardware.host_memory_bytes)} GiB"
            raise InputError(f"--host-mem {options.host_mem:g} is more than the host: {has}.", "Give less.")
    return Budget(device_bytes=started_with or _today(options, hardware), host_bytes=host_bytes, margin=options.margin)


def notes_on(options: SearchOptions, hardware: Hardware, budget: Budget) -> Iterator[str]:
    """Where the budget that `budget_for` grants is another one than the user may think, in sentences."""
    today = _today(options, hardware)
    if (going_on := f"{budget.device_bytes / GIB:.2f}") != f"{today / GIB:.2f}":
        yield f"the search goes on with the budget that it was started with, {going_on} GiB."
    if hardware.device == "cpu":
        return
    asked, allowed = _asked(options, hardware), budget.device_bytes
    if asked > hardware.memory_bytes:
        yield f"--gpu-mem {options.gpu_mem:g} means the card: {hardware.name} has {_gib(hardware.memory_bytes)} GiB."
    if allowed == today < min(asked, hardware.memory_bytes):
        yield f"{_in_use(hardware)}: the budget is what is free, {allowed / GIB:.2f} GiB."


def _today(options: SearchOptions, hardware: Hardware) -> int:
    return _of_cpu(options, hardware) if hardware.device == "cpu" else _of_card(options, hardware)


def _of_cpu(options: SearchOptions, hardware: Hardware) -> int:
    if options.mem is None:
        return int(hardware.host_free_bytes * FREE_FRACTION)
    if gib_to_bytes(options.mem) > hardware.memory_bytes:
        has = f"{hardware.name} has {_gib(hardware.memory_bytes)} GiB"
        raise InputError(f"--mem {options.mem:g} is more than the machine: {has}.", "Give a smaller budget.")
    return gib_to_bytes(options.mem)


def _of_card(options: SearchOptions, hardware: Hardware) -> int:
    asked, free = _asked(options, hardware), hardware.memory_bytes
    if asked > sold_bytes(hardware):
        has = f"{hardware.name} has {_gib(hardware.memory_bytes)} GiB"
        raise InputError(f"--gpu-mem {options.gpu_mem:g} is more than the card: {has}.", "Give a smaller budget.")
    if hardware.used_bytes:
        free = (hardware.memory_bytes - hardware.used_bytes) // _STEP * _STEP
    if not free:
        raise ProbeError(f"{_in_use(hardware)}, so that a search has no room.", END_OTHERS)
    return min(asked, free)


def _asked(options: SearchOptions, hardware: Hardware) -> int:
    return hardware.memory_bytes if options.gpu_mem is None else gib_to_bytes(options.gpu_mem)


def _in_use(hardware: Hardware) -> str:
    return f"{_gib(hardware.used_bytes)} of the card's {_gib(hardware.memory_bytes)} GiB are in use"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
