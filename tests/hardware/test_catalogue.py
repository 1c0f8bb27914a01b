"""The catalogue: every card is complete, and one can stand in for the card that is here."""

from dataclasses import replace

import pytest

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.hardware.catalogue import (
    card,
    card_like,
    card_names,
    card_to_search_for,
    hardware_of,
    link,
    link_names,
    links_of,
    most_common_card,
    sold_bytes,
    standing_in_for,
)
from tests import tiny


@pytest.mark.parametrize("name", card_names())
def test_every_card_is_complete(name: str) -> None:
    found = card(name)
    assert found.name == name
    assert found.title.split()[0] in ("NVIDIA", "AMD")
    assert 4 * GIB < found.memory_bytes < 512 * GIB
    assert 0.9 * found.sold_gb * GIB < found.memory_bytes < found.sold_gb * GIB
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
        geforce_blackwell = found.capability[0] == 12 and "GeForce" in found.title
        assert rates["fp8"] / rates["bf16"] == pytest.approx(
            4 if geforce_blackwell else 2, rel=0.03
        )
    assert 1.5 < rates["fp16"] / rates["fp32"] < 35  # 35: no figure with sparsity
    assert 2e11 < found.bandwidth < 1e13
    assert 1e10 < found.link < found.bandwidth


@pytest.mark.parametrize("name", card_names())
def test_the_links_of_a_card_are_known(name: str) -> None:
    links = card(name).links
    assert links.within.bandwidth > links.between.bandwidth
    assert links.within.latency < links.between.latency
    assert ("through the host" in links.within.title) == ("GeForce" in card(name).title)


@pytest.mark.parametrize("name", link_names())
def test_every_link_is_complete(name: str) -> None:
    assert 5e8 < link(name).bandwidth < 1e12
    assert 1e-6 < link(name).latency < 2e-4
    assert link(name).shared == name.startswith("tcp")


def test_a_link_that_is_not_there_is_told_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match="nvlink4"):
        link("nvlink-4")


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
        (6, "rtx-4060"),
        (8, "rtx-4060"),
        (10, "rtx-3080"),
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
        (94, "h100-nvl"),
        (96, "rtx-pro-6000"),
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


def present(name: str, gib: float, used_gib: float = 0.0) -> Hardware:
    return replace(
        tiny.CPU,
        device="cuda",
        name=name,
        memory_bytes=int(gib * GIB),
        used_bytes=int(used_gib * GIB),
        context_bytes=500,
    )


@pytest.mark.parametrize(
    ("says", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.11, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.0, "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.15, "a100-80gb"),
        ("A100-SXM4-40GB", 39.4, "a100-40gb"),  # as older drivers say
        ("Tesla T4", 14.56, "t4"),
        ("Tesla V100-SXM2-16GB", 15.77, "v100-16gb"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),  # the 480 are the host's
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.6, "rtx-4060-ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 3080", 9.78, "rtx-3080"),
        ("NVIDIA GeForce RTX 3080", 11.77, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4090", 47.4, "rtx-4090"),  # with twice the memory, as some are sold
    ],
)
def test_cards_are_known_by_what_their_drivers_say(says: str, gib: float, name: str) -> None:
    found = card_like(present(says, gib))
    assert found
    assert found.name == name


@pytest.mark.parametrize(
    "says", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_what_has_only_part_of_a_card_is_none_of_the_catalogue(says: str) -> None:
    assert card_like(present(says, 10)) is None


@pytest.mark.parametrize(
    ("says", "gib", "sold"),
    [
        ("NVIDIA GeForce RTX 4090", 23.52, 24),
        ("Tesla T4", 14.56, 16),
        ("NVIDIA L40S", 44.4, 48),
        ("NVIDIA B200", 178.36, 192),
        ("NVIDIA GeForce RTX 4090", 47.4, 52.14),
        ("another", 10, 11),
    ],
)
def test_the_size_a_card_is_sold_as(says: str, gib: float, sold: float) -> None:
    assert sold_bytes(present(says, gib)) / GIB == pytest.approx(sold)


def test_the_links_of_a_card_are_those_it_usually_has_but_for_the_one_that_is_named() -> None:
    h100 = hardware_of(card("h100"))
    usual = links_of(h100.of_several(8, 2))
    assert (usual.within.title, usual.between.title) == (
        "NVLink 4",
        "InfiniBand NDR (400 Gb/s a card)",
    )
    named = links_of(h100.of_several(8, 2, "tcp-25"))
    assert (named.within, named.between) == (usual.within, link("tcp-25"))
    assert links_of(h100.of_several(2, 1, "pcie5")).within == link("pcie5")
    assert links_of(replace(h100, device="cpu", name="a CPU")).within == link("gloo")
    assert links_of(replace(h100, name="another")).within == link("pcie4")
    with pytest.raises(InputError, match="Did you mean 'tcp-25'"):
        links_of(h100.of_several(2, 1, "tcp-26"))


def test_standing_in_takes_memory_and_capability_and_says_where_speed_was_measured() -> None:
    here, target = present("NVIDIA H200", 139.8), card("rtx-4090")
    hardware = standing_in_for(here, target)
    assert (hardware.name, hardware.memory_bytes, hardware.capability) == (
        target.title,
        target.memory_bytes,
        target.capability,
    )
    assert hardware.measured_on == "NVIDIA H200"
    assert (hardware.context_bytes, hardware.cores) == (500, here.cores)


def test_a_card_does_not_stand_in_for_itself() -> None:
    here = present("NVIDIA H100 80GB HBM3", 79.05)
    assert standing_in_for(here, card("h100")) is here


def test_another_card_of_the_size_has_what_both_have() -> None:
    hardware = standing_in_for(present("NVIDIA A10G", 22.0), card("rtx-4090"))
    assert (hardware.memory_bytes, hardware.measured_on) == (22 * GIB, "NVIDIA A10G")


def test_a_larger_card_cannot_be_stood_in_for() -> None:
    with pytest.raises(
        InputError,
        match=r"NVIDIA L40S has more memory than the card here: NVIDIA A10G has 22\.0 GiB\.",
    ):
        standing_in_for(present("NVIDIA A10G", 22.0), card("l40s"))


@pytest.mark.parametrize(("used", "left"), [(100, 0), (130, 13.7)])
def test_what_others_hold_of_the_card_present_may_be_too_much_for_the_other(
    used: float, left: float
) -> None:
    hardware = standing_in_for(present("NVIDIA H200", 139.8, used), card("rtx-4090"))
    assert hardware.used_bytes / GIB == pytest.approx(left, abs=0.01)


def test_of_a_card_that_takes_no_cuda_there_are_only_facts() -> None:
    with pytest.raises(InputError, match=r"AMD Instinct MI300X is not supported") as caught:
        card_to_search_for("mi300x")
    assert "autofit estimate --gpu mi300x" in caught.value.remedy
    assert card_to_search_for("h100") == card("h100")
    assert most_common_card(192).runs_cuda


def test_a_card_by_its_name_alone_is_hardware_with_a_host_large_enough() -> None:
    target = card("rtx-4090")
    hardware = hardware_of(target)
    assert (hardware.device, hardware.name, hardware.measured_on) == ("cuda", target.title, None)
    assert (hardware.memory_bytes, hardware.capability) == (target.memory_bytes, (8, 9))
    assert hardware.context_bytes == target.context_bytes
    assert hardware.host_free_bytes > hardware.memory_bytes
