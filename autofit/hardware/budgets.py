"""The budget that a user's request means on the hardware at hand, and other budgets worth a comparison.

A request up to the size a card is sold as means the card: no card of 24 GB has 24 GiB. Memory in use by other processes
is not available, so a budget is at most what is free: the driver is never run out of memory, and a config that runs out
of memory had its whole budget.
"""

from collections.abc import Iterator

from autofit.core.budget import FREE_FRACTION, Budget, gib_to_bytes
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import OtherBudget
from autofit.hardware.catalogue import card, card_names, sold_bytes
from autofit.hardware.device import END_OTHERS

# free memory is rounded down to this: a little more held by a display tomorrow changes no budget
_STEP = GIB // 4
_MORE_BYTES = 4 * GIB
_SAME_SIZE = 0.1  # cards sold as one size differ by less: of 24 GB ones 22.0 and 23.6 GiB are free


def budget_for(
    options: SearchOptions, hardware: Hardware, started_with: int | None = None
) -> Budget:
    """The budget that the options allow on this hardware. A search that is resumed goes on with the device bytes it was
    `started_with`, whatever is free today: what ran out of less memory would prove nothing of more. Raises InputError
    for more than the machine has, ProbeError where nothing of the card is free."""
    host_bytes = int(
        hardware.host_free_bytes * (FREE_FRACTION if hardware.here else hardware.devices)
    )
    if options.host_mem is not None:
        host_bytes = gib_to_bytes(options.host_mem)
        if host_bytes > hardware.host_memory_bytes and hardware.here:
            has = f"this machine has {_gib(hardware.host_memory_bytes)} GiB"
            raise InputError(
                f"--host-mem {options.host_mem:g} is more than the host: {has}.", "Give less."
            )
    return Budget(started_with or _device_bytes(options, hardware), host_bytes, options.margin)


def budget_notes(options: SearchOptions, hardware: Hardware, budget: Budget) -> Iterator[str]:
    """Sentences on where the budget of `budget_for` differs from what the user may expect."""
    today, allowed = _device_bytes(options, hardware), budget.device_bytes
    if (started_with := f"{allowed / GIB:.2f}") != f"{today / GIB:.2f}":
        yield f"the search continues with the budget it was started with, {started_with} GiB."
    if hardware.device == "cpu":
        return
    asked = _requested(options, hardware)
    if asked > hardware.memory_bytes:
        yield f"--gpu-mem {options.gpu_mem:g} means the card: {hardware.name} has {_gib(hardware.memory_bytes)} GiB."
    if allowed == today < min(asked, hardware.memory_bytes):
        yield f"{_in_use(hardware)}: the budget is what is free, {allowed / GIB:.2f} GiB."


def other_budgets(budget: Budget, hardware: Hardware) -> tuple[OtherBudget, ...]:
    """Budgets to compare this one with, the smallest first. On CUDA the sizes of the next smaller and next larger card
    that compute in every format of this hardware; on a CPU, where no such steps exist, half and twice the budget. And
    on both 4 GiB more, or a quarter where that is less."""
    size, capability = budget.device_bytes, hardware.capability or (0, 0)
    if hardware.device == "cuda":
        cards = [
            each
            for each in map(card, card_names())
            if each.runs_cuda and each.capability >= capability
        ]
        smaller = [each for each in cards if each.memory_bytes < size * (1 - _SAME_SIZE)]
        larger = [each for each in cards if each.memory_bytes > size * (1 + _SAME_SIZE)]
        chosen = [
            ("the next smaller card", each)
            for each in sorted(smaller, key=lambda each: -each.memory_bytes)[:1]
        ]
        chosen += [
            ("the next larger card", each)
            for each in sorted(larger, key=lambda each: each.memory_bytes)[:1]
        ]
        budgets = [OtherBudget(why, each.memory_bytes, each.title) for why, each in chosen]
    else:
        budgets = [
            OtherBudget("half of it", max(1, size // 2)),
            OtherBudget("twice as much", 2 * size),
        ]
    why, more = (
        ("4 GiB more", _MORE_BYTES) if size >= _MORE_BYTES else ("a quarter more", size // 4)
    )
    budgets.append(OtherBudget(why, size + more))
    # of two of the same size the first stays
    by_size = {each.device_bytes: each for each in reversed(budgets)}
    return tuple(by_size[nbytes] for nbytes in sorted(by_size))


def _device_bytes(options: SearchOptions, hardware: Hardware) -> int:
    """What the options allow of the device today."""
    asked, free = _requested(options, hardware), hardware.memory_bytes
    has = f"{hardware.name} has {_gib(hardware.memory_bytes)} GiB"
    if hardware.device == "cpu":
        if options.mem is not None and asked > hardware.memory_bytes:
            raise InputError(
                f"--mem {options.mem:g} is more than the machine: {has}.", "Give a smaller budget."
            )
        return asked
    if asked > sold_bytes(hardware):
        raise InputError(
            f"--gpu-mem {options.gpu_mem:g} is more than the card: {has}.", "Give a smaller budget."
        )
    if hardware.used_bytes:
        free = (hardware.memory_bytes - hardware.used_bytes) // _STEP * _STEP
    if not free:
        raise ProbeError(f"{_in_use(hardware)}, so that a search has no room.", END_OTHERS)
    return min(asked, free)


def _requested(options: SearchOptions, hardware: Hardware) -> int:
    """What the options ask for, or by default all of a card and a share of a CPU's free memory."""
    if hardware.device == "cpu":
        share = int(hardware.host_free_bytes * FREE_FRACTION) // hardware.devices
        return share if options.mem is None else gib_to_bytes(options.mem)
    return hardware.memory_bytes if options.gpu_mem is None else gib_to_bytes(options.gpu_mem)


def _in_use(hardware: Hardware) -> str:
    return f"{_gib(hardware.used_bytes)} of the card's {_gib(hardware.memory_bytes)} GiB are in use"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"
