"""The budget that a user's request means on the hardware at hand, and other budgets worth a
comparison.

A request up to the size a card is sold as means the card: no card of 24 GB has 24 GiB. Memory in
use by other processes is not available, so a budget is at most what is free: the driver is never
run out of memory, and a config that runs out of memory had its whole budget.
"""

from collections.abc import Iterator
from operator import attrgetter

from autofit.core.budget import FREE_FRACTION, Budget, gib_to_bytes
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.pareto import OtherBudget
from autofit.hardware.catalogue import card, card_names, sold_bytes
from autofit.hardware.device import END_OTHERS

# Free memory is rounded down to this: a little more held by a display tomorrow changes no budget.
_STEP = GIB // 4
_MORE_BYTES = 4 * GIB
_SAME_SIZE = 0.1  # cards sold as one size differ by less: of 24 GB ones 22.0 and 23.6 GiB are free
_SMALLER = "Give a smaller budget."


def budget_for(
    options: SearchOptions, hardware: Hardware, started_with: int | None = None
) -> Budget:
    """The budget that the options allow on this hardware.

    Args:
        started_with: the device bytes of a search that is resumed, which goes on with them whatever
            is free today: what ran out of less memory would prove nothing of more.

    Raises:
        InputError: more than the machine has; ProbeError: nothing of the card is free.
    """
    device_bytes = started_with or _device_bytes(options, hardware)
    return Budget(device_bytes, _host_bytes(options, hardware), options.margin)


def budget_notes(options: SearchOptions, hardware: Hardware, budget: Budget) -> Iterator[str]:
    """Sentences on where the budget of `budget_for` differs from what the user may expect."""
    today = _device_bytes(options, hardware)
    allowed = budget.device_bytes
    said = f"{allowed / GIB:.2f} GiB"
    if said != f"{today / GIB:.2f} GiB":
        yield f"the search continues with the budget it was started with, {said}."
    if hardware.device == "cpu":
        return

    asked = _requested(options, hardware)
    total = hardware.memory_bytes
    if asked > total:
        has = f"{hardware.name} has {_gib(total)} GiB"
        yield f"--gpu-mem {options.gpu_mem:g} means the card: {has}."
    if allowed == today < min(asked, total):
        yield f"{_in_use(hardware)}: the budget is what is free, {said}."


def other_budgets(budget: Budget, hardware: Hardware) -> tuple[OtherBudget, ...]:
    """Budgets to compare this one with, the smallest first.

    On CUDA the sizes of the next smaller and next larger card that compute in every format of this
    hardware; on a CPU, where no such steps exist, half and twice the budget. And on both 4 GiB
    more, or a quarter where that is less.
    """
    size = budget.device_bytes
    if hardware.device == "cuda":
        budgets = _of_next_cards(size, hardware.capability or (0, 0))
    else:
        half = OtherBudget("half of it", max(1, size // 2))
        budgets = [half, OtherBudget("twice as much", 2 * size)]

    if size >= _MORE_BYTES:
        budgets.append(OtherBudget("4 GiB more", size + _MORE_BYTES))
    else:
        budgets.append(OtherBudget("a quarter more", size + size // 4))

    # Of two of the same size the first stays.
    by_size = {each.device_bytes: each for each in reversed(budgets)}
    return tuple(by_size[nbytes] for nbytes in sorted(by_size))


def _of_next_cards(size: int, capability: tuple[int, int]) -> list[OtherBudget]:
    """The sizes of the next smaller and the next larger card that compute in every format of a
    capability."""
    cards = [card(name) for name in card_names()]
    cards = [each for each in cards if each.runs_cuda and each.capability >= capability]
    smaller = [each for each in cards if each.memory_bytes < size * (1 - _SAME_SIZE)]
    larger = [each for each in cards if each.memory_bytes > size * (1 + _SAME_SIZE)]

    found = []
    if smaller:
        next_one = max(smaller, key=attrgetter("memory_bytes"))
        found.append(OtherBudget("the next smaller card", next_one.memory_bytes, next_one.title))
    if larger:
        next_one = min(larger, key=attrgetter("memory_bytes"))
        found.append(OtherBudget("the next larger card", next_one.memory_bytes, next_one.title))
    return found


def _host_bytes(options: SearchOptions, hardware: Hardware) -> int:
    """What the options allow of the host."""
    if options.host_mem is None:
        share = FREE_FRACTION if hardware.here else hardware.devices
        return int(hardware.host_free_bytes * share)

    asked = gib_to_bytes(options.host_mem)
    if asked > hardware.host_memory_bytes and hardware.here:
        has = f"this machine has {_gib(hardware.host_memory_bytes)} GiB"
        message = f"--host-mem {options.host_mem:g} is more than the host: {has}."
        raise InputError(message, "Give less.")
    return asked


def _device_bytes(options: SearchOptions, hardware: Hardware) -> int:
    """What the options allow of the device today."""
    asked = _requested(options, hardware)
    total = hardware.memory_bytes
    has = f"{hardware.name} has {_gib(total)} GiB"
    if hardware.device == "cpu":
        if options.mem is not None and asked > total:
            raise InputError(f"--mem {options.mem:g} is more than the machine: {has}.", _SMALLER)
        return asked

    if asked > sold_bytes(hardware):
        raise InputError(f"--gpu-mem {options.gpu_mem:g} is more than the card: {has}.", _SMALLER)
    free = total
    if hardware.used_bytes:
        free = (total - hardware.used_bytes) // _STEP * _STEP
    if not free:
        raise ProbeError(f"{_in_use(hardware)}, so that a search has no room.", END_OTHERS)
    return min(asked, free)


def _requested(options: SearchOptions, hardware: Hardware) -> int:
    """What the options ask for, or by default all of a card and a share of a CPU's free memory."""
    asked = options.mem if hardware.device == "cpu" else options.gpu_mem
    if asked is not None:
        return gib_to_bytes(asked)
    if hardware.device == "cpu":
        return int(hardware.host_free_bytes * FREE_FRACTION) // hardware.devices
    return hardware.memory_bytes


def _in_use(hardware: Hardware) -> str:
    return f"{_gib(hardware.used_bytes)} of the card's {_gib(hardware.memory_bytes)} GiB are in use"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"
