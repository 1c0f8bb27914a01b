"""Which budgets are worth a word beside the one that was asked for."""

import dataclasses

import pytest

from autofit.core.budget import Budget
from autofit.core.hardware import GIB, Hardware
from autofit.hardware.catalogue import card, card_names, hardware_of
from autofit.hardware.other_budgets import other_budgets
from tests import tiny


def told(gib: float, hardware: Hardware) -> dict[str, float]:
    found = other_budgets(Budget(int(gib * GIB), GIB), hardware)
    sizes = [each.device_bytes for each in found]
    assert sizes == sorted(set(sizes))
    assert int(gib * GIB) not in sizes
    return {each.why: round(each.device_bytes / GIB, 2) for each in found}


def on_a_card(name: str, gib: float) -> dict[str, float]:
    return told(gib, hardware_of(card(name)))


def test_on_a_cpu_half_and_twice_and_a_little_more() -> None:
    assert told(8, tiny.CPU) == {"half of it": 4, "4 GiB more": 12, "twice as much": 16}
    assert told(2, tiny.CPU) == {"half of it": 1, "a quarter more": 2.5, "twice as much": 4}
    assert told(4, tiny.CPU) == {"half of it": 2, "twice as much": 8}  # which is 4 GiB more


def test_the_smallest_budget_has_a_half() -> None:
    assert other_budgets(Budget(1, 1), tiny.CPU)[0].device_bytes == 1


def test_on_a_gpu_the_next_sizes_of_cards() -> None:
    assert on_a_card("a100-80gb", 79.2) == {
        "the next smaller card": 47.4,
        "4 GiB more": 83.2,
        "the next larger card": 93.1,
    }
    found = other_budgets(Budget(24 * GIB, GIB), hardware_of(card("rtx-4090")))
    assert found[0].card == "NVIDIA GeForce RTX 4060 Ti 16GB"  # the first of several of that size
    assert found[-1].card == "NVIDIA GeForce RTX 5090"


def test_cards_that_are_sold_as_of_one_size_are_not_smaller_or_larger() -> None:
    sizes = on_a_card("rtx-4090", 24).values()
    assert not {22.0, 23.5, 23.6} & set(sizes)


def test_a_card_that_lacks_number_formats_is_not_told() -> None:
    older = {card(name).title for name in card_names() if card(name).capability < (8, 0)}
    assert older
    for gib in (12, 16, 24, 32, 40):
        found = other_budgets(Budget(gib * GIB, GIB), hardware_of(card("rtx-3090")))
        assert not older & {each.card for each in found}


@pytest.mark.parametrize(("gib", "missing"), [(8, "the next smaller card"), (184, "the next larger card")])
def test_beyond_the_catalogue_nothing_is_told(gib: float, missing: str) -> None:
    hardware = dataclasses.replace(hardware_of(card("rtx-4090")), capability=None)
    found = told(gib, hardware)
    assert missing not in found
    assert len(found) == 2
