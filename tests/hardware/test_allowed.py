"""The budget: what is allowed, against what is there, what it is sold as, and what others hold of it."""

import dataclasses
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.hardware.allowed import budget_for, notes_on
from tests import tiny


def card(name: str, gib: float, used_gib: float = 0.0) -> Hardware:
    here = dataclasses.replace(tiny.CPU, device="cuda", name=name, capability=(8, 9))
    return dataclasses.replace(here, memory_bytes=int(gib * GIB), used_bytes=int(used_gib * GIB))


def told(hardware: Hardware, **given: Any) -> tuple[float, list[str]]:
    """The budget of the device in GiB, and what is said of it."""
    options = search_options(**given)
    budget = budget_for(options, hardware)
    return budget.device_bytes / GIB, list(notes_on(options, hardware, budget))


RTX_4090 = card("NVIDIA GeForce RTX 4090", 23.52)


def test_by_default_most_of_what_a_cpu_has_free_and_the_whole_card() -> None:
    on_cpu = dataclasses.replace(tiny.CPU, host_free_bytes=5 * GIB)
    assert budget_for(search_options(), on_cpu) == Budget(4 * GIB, 4 * GIB)
    assert budget_for(search_options(margin=0.1), RTX_4090) == Budget(RTX_4090.memory_bytes, int(8 * GIB * 0.8), 0.1)
    assert told(tiny.CPU)[1] == told(RTX_4090)[1] == []


def test_what_is_given() -> None:
    assert budget_for(search_options(mem=1.5, host_mem=2), tiny.CPU) == Budget(int(1.5 * GIB), 2 * GIB)
    assert told(RTX_4090, gpu_mem=16) == (16, [])


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
    budget, notes = told(card(name, gib), gpu_mem=asked)
    assert budget == pytest.approx(gib)
    assert notes == [f"--gpu-mem {asked} means the card: {name} has {gib:.1f} GiB."]


@pytest.mark.parametrize(
    ("given", "hardware", "words"),
    [
        ({"mem": 9}, tiny.CPU, r"--mem 9 is more than the machine: a CPU has 8\.0 GiB\. Give a smaller budget\."),
        ({"gpu_mem": 24.5}, RTX_4090, r"--gpu-mem 24\.5 is more than the card: NVIDIA .* 4090 has 23\.5 GiB\."),
        ({"gpu_mem": 26}, card("another", 23.5), r"--gpu-mem 26 is more than the card: another has 23\.5 GiB\."),
        ({"host_mem": 9}, tiny.CPU, r"--host-mem 9 is more than the host: this machine has 8\.0 GiB\. Give less\."),
    ],
    ids=["cpu", "card", "unknown card", "host"],
)
def test_a_budget_larger_than_the_machine(given: dict[str, Any], hardware: Hardware, words: str) -> None:
    with pytest.raises(InputError, match=words):
        budget_for(search_options(**given), hardware)


@pytest.mark.parametrize("asked", [None, 24, 23])
def test_what_others_hold_cannot_be_had(asked: float | None) -> None:
    budget, notes = told(card("NVIDIA GeForce RTX 4090", 23.52, used_gib=3.1), gpu_mem=asked)
    assert budget == 20.25  # of 20.42: a little more or less held is no other budget
    assert notes[-1] == "3.1 of the card's 23.5 GiB are in use: the budget is what is free, 20.25 GiB."
    assert len(notes) == (2 if asked == 24 else 1)


def test_a_budget_that_fits_beside_what_others_hold_stays() -> None:
    assert told(card("NVIDIA GeForce RTX 4090", 23.52, used_gib=3.1), gpu_mem=16) == (16, [])


@pytest.mark.parametrize("used_gib", [0.0, 21.0], ids=["more is free", "less is free"])
def test_a_search_goes_on_with_what_it_was_started_with(used_gib: float) -> None:
    options, hardware = search_options(), card("NVIDIA GeForce RTX 4090", 23.52, used_gib)
    budget = budget_for(options, hardware, 20 * GIB)
    assert budget.device_bytes == 20 * GIB
    assert list(notes_on(options, hardware, budget)) == [
        "the search goes on with the budget that it was started with, 20.00 GiB."
    ]


def test_a_card_of_which_nothing_is_free() -> None:
    with pytest.raises(ProbeError, match=r"^23\.4 of the card's 23\.5 GiB are in use, so that a search has no room\."):
        told(card("NVIDIA GeForce RTX 4090", 23.52, used_gib=23.4), gpu_mem=16)
