"""Budgets beside the one that was asked for, of which it is told what they would run, where that is something else.

On CUDA the sizes of the next smaller and the next larger card of the catalogue; on a CPU, where no such steps exist,
half and twice the budget. And a little more on either: 4 GiB, or a quarter where 4 GiB would be more than that again.
"""

from __future__ import annotations

from autofit.core.budget import Budget
from autofit.core.hardware import GIB, Hardware
from autofit.core.pareto import OtherBudget
from autofit.hardware.catalogue import Card, card, card_names

_MORE_BYTES = 4 * GIB
_ANOTHER_SIZE = 0.1  # cards sold as of one size differ by less: of 24 GB ones 22.0 and 23.6 GiB are free


def other_budgets(budget: Budget, hardware: Hardware) -> tuple[OtherBudget, ...]:
    """The budgets worth a word beside this one, the smallest first."""
    size = budget.device_bytes
    found = list(_of_cards(size, hardware) if hardware.device == "cuda" else _by_halves(size))
    if size >= _MORE_BYTES:
        found.append(OtherBudget("4 GiB more", size + _MORE_BYTES))
    else:
        found.append(OtherBudget("a quarter more", size + size // 4))
    by_size = {each.device_bytes: each for each in reversed(found)}  # where two are the same, the first is told
    return tuple(by_size[each] for each in sorted(by_size))


def _by_halves(size: int) -> tuple[OtherBudget, ...]:
    return OtherBudget("half of it", max(1, size // 2)), OtherBudget("twice as much", 2 * size)


def _of_cards(size: int, hardware: Hardware) -> list[OtherBudget]:
    """The next sizes among cards that can compute in every format that the hardware can."""
    able = hardware.capability or (0, 0)
    cards = [each for each in map(card, card_names()) if each.runs_cuda and each.capability >= able]
    smaller = [each for each in cards if each.memory_bytes < size * (1 - _ANOTHER_SIZE)]
    larger = [each for each in cards if each.memory_bytes > size * (1 + _ANOTHER_SIZE)]
    found = []
    if smaller:
        found.append(_as_budget("the next smaller card", max(smaller, key=_memory)))
    if larger:
        found.append(_as_budget("the next larger card", min(larger, key=_memory)))
    return found


def _memory(each: Card) -> int:
    return each.memory_bytes


def _as_budget(why: str, found: Card) -> OtherBudget:
    return OtherBudget(why, found.memory_bytes, found.title)
