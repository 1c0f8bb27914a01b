"""The budget of a request: what is there, the size a card is sold as, what others hold; and budgets to compare with."""

import dataclasses
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.hardware.budgets import budget_for, budget_notes, other_budgets
from autofit.hardware.catalogue import card, card_names, hardware_of
from tests import tiny


def card_of(name: str, gib: float, used_gib: float = 0.0) -> Hardware:
    here = dataclasses.replace(tiny.CPU, device="cuda", name=name, capability=(8, 9))
    return dataclasses.replace(here, memory_bytes=int(gib * GIB), used_bytes=int(used_gib * GIB))


def granted(hardware: Hardware, **given: Any) -> tuple[float, list[str]]:
    """The budget of the device in GiB, and what is said of it."""
    options = search_options(**given)
    budget = budget_for(options, hardware)
    return budget.device_bytes / GIB, list(budget_notes(options, hardware, budget))


RTX_4090 = card_of("NVIDIA GeForce RTX 4090", 23.52)


def test_by_default_most_of_what_a_cpu_has_free_and_the_whole_card() -> None:
    on_cpu = dataclasses.replace(tiny.CPU, host_free_bytes=5 * GIB)
    assert budget_for(search_options(), on_cpu) == Budget(4 * GIB, 4 * GIB)
    assert budget_for(search_options(margin=0.1), RTX_4090) == Budget(
        RTX_4090.memory_bytes, int(8 * GIB * 0.8), 0.1
    )
    assert granted(tiny.CPU)[1] == granted(RTX_4090)[1] == []


def test_what_is_given() -> None:
    assert budget_for(search_options(mem=1.5, host_mem=2), tiny.CPU) == Budget(
        int(1.5 * GIB), 2 * GIB
    )
    assert granted(RTX_4090, gpu_mem=16) == (16, [])


@pytest.mark.parametrize(
    ("name", "gib", "asked"),
    [
        ("NVIDIA GeForce RTX 4090", 23.52, 24),
        ("NVIDIA H100 80GB HBM3", 79.11, 80),
        ("Tesla T4", 14.56, 16),
        ("NVIDIA A10G", 22.0, 24),
        ("NVIDIA L40S", 44.39, 48),
        ("NVIDIA B200", 178.36, 192),
        ("a card of tomorrow", 23.5, 25),
    ],
)
def test_the_size_a_card_is_sold_as_means_the_card(name: str, gib: float, asked: float) -> None:
    budget, notes = granted(card_of(name, gib), gpu_mem=asked)
    assert budget == pytest.approx(gib)
    assert notes == [f"--gpu-mem {asked} means the card: {name} has {gib:.1f} GiB."]


@pytest.mark.parametrize(
    ("given", "hardware", "words"),
    [
        (
            {"mem": 9},
            tiny.CPU,
            r"--mem 9 is more than the machine: a CPU has 8\.0 GiB\. Give a smaller budget\.",
        ),
        (
            {"gpu_mem": 24.5},
            RTX_4090,
            r"--gpu-mem 24\.5 is more than the card: NVIDIA .* 4090 has 23\.5 GiB\.",
        ),
        (
            {"gpu_mem": 26},
            card_of("another", 23.5),
            r"--gpu-mem 26 is more than the card: another has 23\.5 GiB\.",
        ),
        (
            {"host_mem": 9},
            tiny.CPU,
            r"--host-mem 9 is more than the host: this machine has 8\.0 GiB\. Give less\.",
        ),
    ],
    ids=["cpu", "card", "unknown card", "host"],
)
def test_a_budget_larger_than_the_machine(
    given: dict[str, Any], hardware: Hardware, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        budget_for(search_options(**given), hardware)


def test_the_host_of_a_card_that_is_elsewhere_has_what_is_said_or_four_times_the_cards_memory() -> (
    None
):
    elsewhere = hardware_of(card("rtx-4090"))
    assert budget_for(search_options(), elsewhere).host_bytes == 4 * elsewhere.memory_bytes
    assert (
        budget_for(search_options(), elsewhere.of_several(2)).host_bytes
        == 8 * elsewhere.memory_bytes
    )
    assert budget_for(search_options(host_mem=999), elsewhere).host_bytes == 999 * GIB


@pytest.mark.parametrize("asked", [None, 24, 23])
def test_what_others_hold_cannot_be_had(asked: float | None) -> None:
    budget, notes = granted(card_of("NVIDIA GeForce RTX 4090", 23.52, used_gib=3.1), gpu_mem=asked)
    assert budget == 20.25  # of 20.42: a little more or less held is no other budget
    assert (
        notes[-1] == "3.1 of the card's 23.5 GiB are in use: the budget is what is free, 20.25 GiB."
    )
    assert len(notes) == (2 if asked == 24 else 1)


def test_a_budget_that_fits_beside_what_others_hold_stays() -> None:
    assert granted(card_of("NVIDIA GeForce RTX 4090", 23.52, used_gib=3.1), gpu_mem=16) == (16, [])


@pytest.mark.parametrize("used_gib", [0.0, 21.0], ids=["more is free", "less is free"])
def test_a_search_goes_on_with_what_it_was_started_with(used_gib: float) -> None:
    options, hardware = search_options(), card_of("NVIDIA GeForce RTX 4090", 23.52, used_gib)
    budget = budget_for(options, hardware, 20 * GIB)
    assert budget.device_bytes == 20 * GIB
    assert list(budget_notes(options, hardware, budget)) == [
        "the search continues with the budget it was started with, 20.00 GiB."
    ]


def test_a_card_without_free_memory() -> None:
    with pytest.raises(
        ProbeError,
        match=r"^23\.4 of the card's 23\.5 GiB are in use, so that a search has no room\.",
    ):
        granted(card_of("NVIDIA GeForce RTX 4090", 23.52, used_gib=23.4), gpu_mem=16)


def compared(gib: float, hardware: Hardware) -> dict[str, float]:
    found = other_budgets(Budget(int(gib * GIB), GIB), hardware)
    sizes = [each.device_bytes for each in found]
    assert sizes == sorted(set(sizes))
    assert int(gib * GIB) not in sizes
    return {each.why: round(each.device_bytes / GIB, 2) for each in found}


def on_a_card(name: str, gib: float) -> dict[str, float]:
    return compared(gib, hardware_of(card(name)))


def test_on_a_cpu_half_and_twice_and_a_little_more() -> None:
    assert compared(8, tiny.CPU) == {"half of it": 4, "4 GiB more": 12, "twice as much": 16}
    assert compared(2, tiny.CPU) == {"half of it": 1, "a quarter more": 2.5, "twice as much": 4}
    assert compared(4, tiny.CPU) == {"half of it": 2, "twice as much": 8}  # which is 4 GiB more


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


def test_a_card_that_lacks_number_formats_is_left_out() -> None:
    older = {card(name).title for name in card_names() if card(name).capability < (8, 0)}
    assert older
    for gib in (12, 16, 24, 32, 40):
        found = other_budgets(Budget(gib * GIB, GIB), hardware_of(card("rtx-3090")))
        assert not older & {each.card for each in found}


@pytest.mark.parametrize(
    ("gib", "missing"), [(8, "the next smaller card"), (184, "the next larger card")]
)
def test_beyond_the_catalogue_there_is_no_card(gib: float, missing: str) -> None:
    hardware = dataclasses.replace(hardware_of(card("rtx-4090")), capability=None)
    found = compared(gib, hardware)
    assert missing not in found
    assert len(found) == 2
