"""The catalogue of cards that need not be present (`--gpu NAME`): memory, capability, peak rates
and links."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, require, unknown
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.links import Link, Links
from autofit.core.strict_yaml import load_mapping, load_own

_SOLD_TO_REAL = 1.1  # at most: 16 GB of a T4 are 14.6 GiB
_OF_CPUS = ("gloo", "tcp-10")  # links within a node, and between nodes
_OF_UNKNOWN = ("pcie4", "tcp-100")
_MOST_DOLLARS = 1_000_000  # an hour
_MAKER = "NVIDIA "  # which drivers before version 470 leave out


@dataclass(frozen=True)
class Card:
    """One GPU model. Sizes in bytes, rates per second.

    Attributes:
        drivers_say: the names that drivers give such a card, the title included.
        sold_gb: the size on the box, in GB.
        flops_per_second: of dense products, by their format (fp32, tf32, bf16, fp16, fp8, int8).
        bandwidth: of the memory.
        link: to the host.
        links: to other cards.
        context_bytes: memory of an open context.
        most_common: most people who name only its size mean this card.
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
    links: Links
    context_bytes: int
    most_common: bool

    @property
    def short_names(self) -> set[str]:
        """What drivers call it, without the maker."""
        return {name.removeprefix(_MAKER) for name in self.drivers_say}

    @property
    def runs_cuda(self) -> bool:
        """Whether a search can be for it; other cards are only estimated for."""
        return self.title.startswith(_MAKER)


@cache
def _links() -> dict[str, Link]:
    found = {}
    for name, data in load_own(Path(__file__).with_name("links.yaml")).items():
        shared = data.get("shared", False)
        found[name] = Link(data["title"], data["gb_s"] * 1e9, data["latency_us"] * 1e-6, shared)
    return found


def link_names() -> list[str]:
    """The names of all links."""
    return list(_links())


def link(name: str) -> Link:
    """The link of that name. Raises InputError, which names the nearest one."""
    if name not in _links():
        raise unknown("link", name, link_names())
    return _links()[name]


@cache
def _cards() -> dict[str, Card]:
    listed = load_own(Path(__file__).with_name("gpus.yaml"))
    return {name: _card(name, data) for name, data in listed.items()}


def _card(name: str, data: Mapping[str, Any]) -> Card:
    """A card of the file."""
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
        links=Links(link(data["peers"]), link(data["network"])),
        context_bytes=data["context_mib"] * MIB,
        most_common=data.get("most_common", False),
    )


def card_names() -> list[str]:
    """Every name that `--gpu` takes."""
    return list(_cards())


def card(name: str) -> Card:
    """The card of that name. Raises InputError, which names the nearest one."""
    if name not in _cards():
        raise unknown("GPU", name, card_names())
    return _cards()[name]


def card_prices(source: Mapping[str, Any] | str | Path) -> Mapping[str, float]:
    """Dollars an hour for one card, by its name.

    Raises:
        InputError: a card is unknown, or something is no price.
    """
    prices = source if isinstance(source, Mapping) else load_mapping(source)
    for name, price in prices.items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        is_price = is_number and 0 <= price <= _MOST_DOLLARS
        rule = f"must be dollars an hour, from 0 to {_MOST_DOLLARS:,}"
        require(is_price, f"the price of {card(name).name} {rule}", price)
    return prices


def card_to_search_for(name: str) -> Card:
    """The card of that name, if autofit can run on it.

    Raises:
        InputError: there is no such card, or it runs no CUDA.
    """
    target = card(name)
    if not target.runs_cuda:
        message = f"{target.title} is not supported: autofit runs on cards that take CUDA."
        raise InputError(message, f"What a config would need there: autofit estimate --gpu {name}.")
    return target


def most_common_card(gib: float) -> Card:
    """The most common card sold with so much memory, or with the next larger size, or with the
    largest."""
    common = [each for each in _cards().values() if each.most_common]
    common.sort(key=attrgetter("sold_gb"))
    return next((each for each in common if each.sold_gb >= gib), common[-1])


def card_like(hardware: Hardware) -> Card | None:
    """The card of the catalogue that the hardware is, or is measured on; None where it is none of
    them.

    The driver's name identifies it, and among cards of the same name the memory.
    """
    name = (hardware.measured_on or hardware.name).removeprefix(_MAKER)
    alike = [each for each in _cards().values() if name in each.short_names]
    return min(alike, key=lambda each: abs(each.memory_bytes - hardware.memory_bytes), default=None)


def links_of(hardware: Hardware) -> Links:
    """The links that its devices exchange data by: those that its card usually has, but for the one
    that was named, between nodes where there are several, else within a node; or that was measured
    there."""
    found = card_like(hardware)
    if found:
        links = found.links
    else:
        within, between = _OF_CPUS if hardware.device == "cpu" else _OF_UNKNOWN
        links = Links(link(within), link(between))

    if hardware.link is None:
        return Links(hardware.measured_link or links.within, links.between)
    named = link(hardware.link)
    if hardware.nodes > 1:
        return Links(links.within, named)
    return Links(named, links.between)


def sold_bytes(hardware: Hardware) -> int:
    """The size that a card is sold as, a little more than it has; of an unknown card the largest it
    can be."""
    listed = card_like(hardware)
    most = int(hardware.memory_bytes * _SOLD_TO_REAL)
    # Else it is a part of such a card, or one with more chips.
    if listed and hardware.memory_bytes <= listed.sold_gb * GIB <= most:
        return listed.sold_gb * GIB
    return most


def hardware_of(target: Card) -> Hardware:
    """The hardware of a prediction for a card that is absent; its host is assumed: four times the
    card's memory, 8 cores."""
    return Hardware(
        device="cuda",
        name=target.title,
        memory_bytes=target.memory_bytes,
        host_memory_bytes=4 * target.memory_bytes,
        host_free_bytes=4 * target.memory_bytes,
        cores=8,
        capability=target.capability,
        context_bytes=target.context_bytes,
        here=False,
    )


def standing_in_for(present: Hardware, target: Card) -> Hardware:
    """The hardware of a search whose speed is measured on the card present and whose memory is that
    of the target.

    A card does not stand in for itself: its own driver knows its memory better than the catalogue.

    Raises:
        InputError: the target has more memory than the card present.
    """
    listed = card_like(present)
    if listed and listed.name == target.name:
        return present
    if target.sold_gb * GIB > max(sold_bytes(present), present.memory_bytes):
        has = f"{present.name} has {present.memory_bytes / GIB:.1f} GiB"
        message = f"{target.title} has more memory than the card here: {has}."
        raise InputError(message, "Search on a larger card.")

    # 24 GB are 22.0 GiB of one and 23.6 of another.
    memory_bytes = min(target.memory_bytes, present.memory_bytes)
    left_out = present.memory_bytes - memory_bytes
    return replace(
        present,
        name=target.title,
        memory_bytes=memory_bytes,
        used_bytes=max(0, present.used_bytes - left_out),
        capability=target.capability,
        measured_on=present.name,
    )
