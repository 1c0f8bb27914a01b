"""The catalogue of cards: memory, capability and rates of a GPU that need not be here (`--gpu NAME`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, unknown
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.strict_yaml import load_mapping

_SOLD_TO_REAL = 1.1  # at most: 16 GB of a T4 are 14.6 GiB
_MAKER = "NVIDIA "  # which drivers before version 470 leave out


@dataclass(frozen=True)
class Card:
    """One GPU model: total memory in bytes, the GB it is sold as, compute capability, and peak rates.

    `drivers_say` is all that such a card is called by the drivers, the title included.
    `flops_per_second` is of dense matrix products by the format they are computed in (fp32, tf32, bf16, fp16, fp8,
    int8); `bandwidth` of the memory and `link` to the host are in bytes per second. `context_bytes` is what an open
    context takes of the memory.
    """

    name: str
    title: str
    drivers_say: frozenset[str]
    memory_bytes: int
    sold_gb: int
    capability: tuple[int, int]
    flops_per_second: Mapping[str, float]
    bandwidth: float
    link: float
    context_bytes: int

    @property
    def runs_cuda(self) -> bool:
        """Whether it is one that can be searched for; of others there are only facts, for estimates."""
        return self.title.startswith(_MAKER)


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
        drivers_say=frozenset([data["title"], *data.get("drivers_say", [])]),
        memory_bytes=int(data["memory_gib"] * GIB),
        sold_gb=data["sold_gb"],
        capability=(major, minor),
        flops_per_second={kind: tera * 1e12 for kind, tera in data["tflops"].items()},
        bandwidth=data["bandwidth_gb_s"] * 1e9,
        link=data["link_gb_s"] * 1e9,
        context_bytes=data["context_mib"] * MIB,
    )


def card_to_search_for(name: str) -> Card:
    """The card of that name, which autofit can run on.

    Raises:
        InputError: no such card, or one that takes no CUDA.
    """
    found = card(name)
    if not found.runs_cuda:
        message = f"{found.title} is not supported: autofit runs on cards that take CUDA."
        raise InputError(message, f"What a config would need there: autofit estimate --gpu {name}.")
    return found


def most_common_card(gib: float) -> Card:
    """The most common card sold with so much memory, or with the next larger size, or with the largest."""
    most_common = [card(name) for name, data in _cards().items() if data.get("most_common")]
    enough = [each for each in most_common if each.sold_gb >= gib]
    return min(enough, key=_sold) if enough else max(most_common, key=_sold)


def _sold(each: Card) -> int:
    return each.sold_gb


def card_like(hardware: Hardware) -> Card | None:
    """The card of the catalogue that the hardware is, or that it is measured on; None where it is none of them.

    It is known by what its driver calls it, and of several that are called alike by its memory.
    """
    wanted = _plain(hardware.measured_on or hardware.name)
    alike = [each for each in map(card, card_names()) if wanted in map(_plain, each.drivers_say)]
    return min(alike, key=lambda each: abs(each.memory_bytes - hardware.memory_bytes), default=None)


def sold_bytes(hardware: Hardware) -> int:
    """The size that a card is sold as, which is a little more than it has; of an unknown one the most that may be."""
    known = card_like(hardware)
    most = int(hardware.memory_bytes * _SOLD_TO_REAL)
    if known and hardware.memory_bytes <= known.sold_gb * GIB <= most:  # else part of it, or one with more chips
        return known.sold_gb * GIB
    return most


def _plain(name: str) -> str:
    return name.removeprefix(_MAKER)


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
    """The hardware a search is for when speed is measured on the card present and memory is that of another.

    A card does not stand in for itself: its own driver knows its memory better than the catalogue.

    Raises:
        InputError: the target has more memory than the card present.
    """
    known = card_like(present)
    if known and known.name == target.name:
        return present
    if target.sold_gb * GIB > max(sold_bytes(present), present.memory_bytes):
        has = f"{present.name} has {present.memory_bytes / GIB:.1f} GiB"
        raise InputError(f"{target.title} has more memory than the card here: {has}.", "Search on a larger card.")
    memory_bytes = min(target.memory_bytes, present.memory_bytes)  # 24 GB are 22.0 GiB of one and 23.6 of another
    return replace(
        present,
        name=target.title,
        memory_bytes=memory_bytes,
        used_bytes=max(0, present.used_bytes - (present.memory_bytes - memory_bytes)),
        capability=target.capability,
        measured_on=present.name,
    )
