"""The catalogue of cards: memory, capability and rates of a GPU that need not be here (`--gpu NAME`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autofit.core.errors import unknown
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.strict_yaml import load_mapping


@dataclass(frozen=True)
class Card:
    """One GPU model: total memory in bytes, the GB it is sold as, compute capability, and peak rates.

    `flops_per_second` is of dense matrix products by the format they are computed in (fp32, tf32, bf16, fp16, fp8,
    int8); `bandwidth` of the memory and `link` to the host are in bytes per second. `context_bytes` is what an open
    context takes of the memory.
    """

    name: str
    title: str
    memory_bytes: int
    sold_gb: int
    capability: tuple[int, int]
    flops_per_second: Mapping[str, float]
    bandwidth: float
    link: float
    context_bytes: int


@cache
def _cards() -> dict[str, dict[str, Any]]:
    return load_mapping(Path(__file__).with_name("gpus.yaml"))


def card_names() -> list[str]:
    """Every name that `--gpu` takes."""
    return list(_cards())


def card(name: str) -> Card:
    """The card of that name.

    Raises:
        InputError: no such card; names the nearest one.
    """
    if name not in _cards():
        raise unknown("GPU", name, card_names())
    data = _cards()[name]
    major, minor = data["capability"]
    return Card(
        name=name,
        title=data["title"],
        memory_bytes=int(data["memory_gib"] * GIB),
        sold_gb=data["sold_gb"],
        capability=(major, minor),
        flops_per_second={kind: tera * 1e12 for kind, tera in data["tflops"].items()},
        bandwidth=data["bandwidth_gb_s"] * 1e9,
        link=data["link_gb_s"] * 1e9,
        context_bytes=data["context_mib"] * MIB,
    )


def most_common_card(gib: float) -> Card:
    """The most common card sold with so much memory, or with the next larger size, or with the largest."""
    most_common = [card(name) for name, data in _cards().items() if data.get("most_common")]
    enough = [each for each in most_common if each.sold_gb >= gib]
    return min(enough, key=_sold) if enough else max(most_common, key=_sold)


def _sold(each: Card) -> int:
    return each.sold_gb


def card_like(hardware: Hardware) -> Card | None:
    """The card of the catalogue that the hardware is, by its title; None where it is none of them."""
    wanted = hardware.measured_on or hardware.name
    return next((card(name) for name in card_names() if card(name).title == wanted), None)


def hardware_of(target: Card) -> Hardware:
    """The hardware a prediction is for when only the name of the card is known.

    Of its host nothing is: it is taken to have twice the card's memory, and 8 cores.
    """
    return Hardware(
        device="cuda",
        name=target.title,
        memory_bytes=target.memory_bytes,
        host_memory_bytes=2 * target.memory_bytes,
        host_free_bytes=2 * target.memory_bytes,
        cores=8,
        capability=target.capability,
        context_bytes=target.context_bytes,
        here=False,
    )


def standing_in_for(present: Hardware, target: Card) -> Hardware:
    """The hardware a search is for when speed is measured on the card present and memory is that of another."""
    return replace(
        present,
        name=target.title,
        memory_bytes=target.memory_bytes,
        capability=target.capability,
        measured_on=present.name if present.name != target.title else None,
    )
