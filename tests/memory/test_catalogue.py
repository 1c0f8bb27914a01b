"""The catalogue: every card is complete, and one can stand in for the card that is here."""

from dataclasses import replace

import pytest
import tiny

from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.memory.catalogue import card, card_names, hardware_of, standing_in_for


@pytest.mark.parametrize("name", card_names())
def test_every_card_is_complete(name: str) -> None:
    found = card(name)
    assert found.name == name
    assert found.title.startswith("NVIDIA ")
    assert 4 * GIB < found.memory_bytes < 512 * GIB
    major, minor = found.capability
    assert 7 <= major <= 12
    assert 0 <= minor <= 9


def test_the_cards_of_the_documentation() -> None:
    assert {"a100-80gb", "rtx-4090"} <= set(card_names())
    assert card("a100-80gb").capability == (8, 0)
    assert card("rtx-4090").memory_bytes < 24 * GIB  # the driver reports less than the box says


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown GPU 'a100-80g'\. Did you mean 'a100-80gb'\?"):
        card("a100-80g")


def test_standing_in_takes_memory_and_capability_and_says_where_speed_was_measured() -> None:
    present = replace(tiny.CPU, device="cuda", name="NVIDIA H200", capability=(9, 0), context_bytes=500)
    target = card("rtx-4090")
    hardware = standing_in_for(present, target)
    assert (hardware.name, hardware.memory_bytes, hardware.capability) == (
        target.title,
        target.memory_bytes,
        target.capability,
    )
    assert hardware.measured_on == "NVIDIA H200"
    assert (hardware.context_bytes, hardware.cores) == (500, present.cores)


def test_a_card_does_not_stand_in_for_itself() -> None:
    target = card("h200")
    assert standing_in_for(replace(tiny.CPU, device="cuda", name=target.title), target).measured_on is None


def test_a_card_by_its_name_alone_is_hardware_with_a_host_large_enough() -> None:
    target = card("rtx-4090")
    hardware = hardware_of(target)
    assert (hardware.device, hardware.name, hardware.measured_on) == ("cuda", target.title, None)
    assert (hardware.memory_bytes, hardware.capability) == (target.memory_bytes, (8, 9))
    assert hardware.host_free_bytes > hardware.memory_bytes
