"""The catalogue: every card is complete, and one can stand in for the card that is here."""

from dataclasses import replace

import pytest
import tiny

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, MIB
from autofit.memory.catalogue import card, card_names, hardware_of, most_common_card, standing_in_for


@pytest.mark.parametrize("name", card_names())
def test_every_card_is_complete(name: str) -> None:
    found = card(name)
    assert found.name == name
    assert found.title.split()[0] in ("NVIDIA", "AMD")
    assert 4 * GIB < found.memory_bytes < 512 * GIB
    major, minor = found.capability
    assert 7 <= major <= 12
    assert 0 <= minor <= 9
    assert 100 * MIB < found.context_bytes < 700 * MIB


@pytest.mark.parametrize("name", card_names())
def test_the_rates_of_a_card_agree_with_its_architecture(name: str) -> None:
    found = card(name)
    rates = found.flops_per_second
    ampere, ada = found.capability >= (8, 0), found.capability >= (8, 9)
    assert set(rates) == {
        "fp32",
        "fp16",
        *(("tf32", "bf16") if ampere else ()),
        *(("fp8",) if ada else ()),
        *(("int8",) if found.capability >= (7, 5) else ()),
    }
    if ampere:
        assert rates["bf16"] == rates["fp16"]
        assert 1.7 < rates["bf16"] / rates["tf32"] < 2.1
    if ada:
        assert rates["fp8"] / rates["bf16"] == pytest.approx(4 if found.capability[0] == 12 else 2, rel=0.03)
    assert 1.5 < rates["fp16"] / rates["fp32"] < 30  # 30: no figure with sparsity
    assert 2e11 < found.bandwidth < 1e13
    assert 1e10 < found.link < found.bandwidth


def test_geforce_cards_sum_in_fp32_at_half_the_rate() -> None:
    for name in card_names():
        rates = card(name).flops_per_second
        if "GeForce" in card(name).title and "bf16" in rates:
            assert rates["tf32"] == rates["fp32"]
            assert rates["bf16"] == pytest.approx(2 * rates["fp32"], rel=0.01)
            assert rates["int8"] == pytest.approx(4 * rates["bf16"], rel=0.01)


def test_the_cards_of_the_documentation() -> None:
    assert {"a100-80gb", "rtx-4090"} <= set(card_names())
    assert card("a100-80gb").capability == (8, 0)
    assert card("rtx-4090").memory_bytes < 24 * GIB  # the driver reports less than the box says


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (11, "rtx-2080-ti"),
        (12, "rtx-3060"),
        (16, "rtx-4080"),
        (23.5, "rtx-4090"),  # as its driver says
        (24, "rtx-4090"),
        (32, "rtx-5090"),
        (40, "a100-40gb"),
        (48, "l40s"),
        (60, "h100"),  # no card has that size
        (80, "h100"),
        (141, "h200"),
        (192, "b200"),
        (500, "b200"),
    ],
)
def test_the_most_common_card_of_a_size(gib: float, name: str) -> None:
    assert most_common_card(gib).name == name


def test_of_each_size_one_card_is_the_most_common() -> None:
    for size in {card(name).sold_gb for name in card_names()}:
        assert most_common_card(size).sold_gb == size


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
    assert hardware.context_bytes == target.context_bytes
    assert hardware.host_free_bytes > hardware.memory_bytes
