"""What executors share: which cards of the machine a probe can use."""

import dataclasses
from collections.abc import Callable
from typing import Any

from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.probe import Executor, Request
from autofit.probe.measure import list_cards
from tests import tiny

CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0)
)
SMALLER = dataclasses.replace(CARD, memory_bytes=70 * GIB)
OTHER = dataclasses.replace(CARD, name="NVIDIA T4")


class Cards(Executor):
    """On a machine with these cards; None is one that others use."""

    def __init__(self, **cards: Hardware | None) -> None:
        self.cards = cards

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        raise NotImplementedError

    def run(
        self, function: Callable[..., Any], workload: Workload | None, *arguments: Any, **_: Any
    ) -> Any:
        if function is list_cards:
            return tuple(self.cards)
        if (card := self.cards[arguments[0]]) is None:
            raise ProbeError("others use it.")
        return card

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_idle_cards_are_those_that_equal_card_0_and_nobody_uses() -> None:
    executor = Cards(a=CARD, b=CARD, busy=None, smaller=SMALLER, other=OTHER, c=CARD)
    assert executor.idle_cards_like(CARD, 0) == ["a", "b", "c"]
    assert Cards(a=CARD, other=OTHER).idle_cards_like(CARD, 0) == ["a"]


def test_a_card_that_has_less_free_than_a_probe_may_take_is_left_out() -> None:
    """Else the first probe that runs out of memory there would end the search: others have what it lacked."""
    small = dataclasses.replace(CARD, memory_bytes=8 * GIB)
    executor = Cards(a=small, desktop=dataclasses.replace(small, used_bytes=GIB), b=small)
    assert executor.idle_cards_like(small, Budget(8 * GIB, GIB).cap_bytes("cuda")) == ["a", "b"]
    assert executor.idle_cards_like(small, Budget(7 * GIB, GIB).cap_bytes("cuda")) == [
        "a",
        "desktop",
        "b",
    ]
