"""The context of a search: workload, hardware, budget, placement and space, all known before the
first probe."""

import dataclasses
import functools
import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from autofit import techniques
from autofit.core.budget import FREE_FRACTION, Budget, gib_to_bytes
from autofit.core.environment import versions
from autofit.core.errors import InputError, pluralize
from autofit.core.events import Listener
from autofit.core.hardware import GIB, Hardware
from autofit.core.links import Link
from autofit.core.options import SearchOptions
from autofit.core.result import Result
from autofit.core.workload import Workload
from autofit.hardware.budgets import budget_for, budget_notes
from autofit.hardware.catalogue import card_to_search_for, link, links_of, standing_in_for
from autofit.probe import Executor, Place, Placement, place_probes, place_ranks
from autofit.search.beside_tensors import beside_tensors
from autofit.search.journal import begun_with
from autofit.search.objectives.discounted import PREFERENCES
from autofit.search.ranking import Ranking
from autofit.search.space import Space
from autofit.tuning.space import space_for

_NO_FINGERPRINT = (
    "this model's code has no stable fingerprint, so earlier measurements of it are not looked up."
)


class Judging(Protocol):
    """Finds out what the finalists of a search learn, from a file and weights."""

    data: str | Path
    weights: str | Path | None

    def check(self, workload: Workload, options: SearchOptions) -> None:
        """Raise an InputError where it cannot."""

    def __call__(self, result: Result, executor: Executor, listener: Listener) -> Result:
        """The result with what it found."""


@dataclass(frozen=True)
class Context:
    """What a search is of.

    Attributes:
        workload: with its traits.
        hardware: that the answer is for.
        measured_on: the hardware that probes run on.
        requested_bytes: of the device; None for the default budget.
        placement: where probes explore; finalists run one at a time on all of the machine.
        ranks: where the devices are that train one config together; none for one device.
        budget_notes: where the budget differs from what the user may expect.
    """

    options: SearchOptions
    workload: Workload
    hardware: Hardware
    measured_on: Hardware
    requested_bytes: int | None
    budget: Budget
    placement: Placement
    ranks: tuple[Place, ...]
    space: Space
    budget_notes: tuple[str, ...]

    @property
    def cap_bytes(self) -> int:
        """What tensors may take of the device."""
        return self.budget.cap_bytes(self.hardware.device, self.hardware.context_bytes)

    @property
    def fewer_cores(self) -> bool:
        """Whether exploring probes have fewer cores than finalists, so that their speeds cannot be
        compared."""
        return self.placement.cores_of_each is not None

    @property
    def of_one_rank(self) -> bool:
        """Whether probes measure the first rank without the others, for want of devices."""
        return self.hardware.world > 1 and not self.ranks

    @property
    def context_bytes(self) -> int | None:
        """Of a card's context, beside which tensors lie; None on a CPU."""
        return self.hardware.context_bytes if self.hardware.device == "cuda" else None

    @property
    def likely_bytes(self) -> float:
        """What tensors will probably be able to take, beside what a card holds besides."""
        if self.context_bytes is None:
            return self.cap_bytes
        beside = beside_tensors((), self.context_bytes)
        return max(0.0, beside.left(self.cap_bytes + self.context_bytes))

    @property
    def exact_memory(self) -> bool:
        """Whether the tracked peak alone decides what fits, and is the same on every run.

        Not where ranks exchange something, which comes and goes.
        """
        return self.hardware.device == "cpu" and self.hardware.world == 1

    def linked_by(self, link: Link | None) -> Self:
        """The same with the link that was measured between the devices."""
        hardware = dataclasses.replace(self.hardware, measured_link=link)
        return dataclasses.replace(self, hardware=hardware, measured_on=hardware)

    def notes(self) -> tuple[str, ...]:
        """What the user should know before the first probe."""
        traits = self.workload.traits
        notes = [*self.measured_on.notes, *self.budget_notes]
        if traits:
            notes += traits.notes

        devices = self.stands_for() if self.of_one_rank else self._describe_ranks()
        places = self.placement.describe(self.measured_on)
        notes.append(" ".join(filter(None, (devices, places))))

        if self.options.store and not (traits and traits.fingerprint):
            notes.append(_NO_FINGERPRINT)
        return tuple(filter(None, notes))

    def _describe_ranks(self) -> str | None:
        """A sentence or two on the processes that train a config together; None where one does."""
        if not self.ranks:
            return None

        cores = self.ranks[0].cores
        device = pluralize(cores, "core") if cores else "a card"
        text = f"{len(self.ranks)} processes train each config together, on {device} each."

        link = self.hardware.measured_link
        if link:
            speed = f"{link.bandwidth / 1e9:.3g} GB/s after {link.latency * 1e6:.0f} microseconds"
            text += f" They exchange {speed}, as measured."
        return text

    def stands_for(self) -> str:
        """A sentence on what is measured where one rank stands for all."""
        return (
            f"Rank 0 of {self.hardware.world} stands for all: its memory and computation are "
            f"measured, communication is predicted (over {self.predicted_links}), so that no speed "
            "is verified."
        )

    @property
    def predicted_links(self) -> str:
        """What communication is predicted over; empty where it is measured."""
        if not self.of_one_rank:
            return ""

        links = links_of(self.hardware)
        titles = []
        if self.hardware.devices > 1:
            titles.append(links.within.title)
        if self.hardware.nodes > 1:
            titles.append(f"{links.between.title} between nodes")
        return ", ".join(titles)

    def identity(self) -> dict[str, Any]:
        """What must be the same for measurements to be comparable when a search is resumed."""
        hardware = self.hardware
        identity = {
            "model": self.workload.name,
            **self.workload.summary(),
            "device": hardware.name,
            # As requested: the default, and what is granted of a request, depend on what is free
            # on the day.
            "budget_bytes": self.requested_bytes,
            "margin": self.budget.margin,
            "torch": importlib.metadata.version("torch"),
            "cores_of_each_worker": self.placement.cores_of_each,
        }
        if hardware.world > 1:
            identity["devices"] = hardware.devices
            identity["nodes"] = hardware.nodes
        if self.of_one_rank:
            identity["predicted_links"] = self.predicted_links
        if self.options.executor != "local" and hardware.device == "cpu":
            identity["processors_of_each_probe"] = self.measured_on.cores // hardware.devices
        return identity


def ranking_for(options: SearchOptions) -> Ranking:
    """The rule by which a search recommends a config."""
    return Ranking(
        options.tolerance,
        techniques.fidelity,
        PREFERENCES[options.prefer],
        techniques.optional_packages,
    )


def about_search(
    workload: Workload, hardware: Hardware, budget: Budget, start: float
) -> dict[str, Any]:
    """The fields of a Result that say what was searched for, and how long that took.

    Args:
        start: by time.monotonic().
    """
    return {
        "model": workload.name,
        "workload": workload.description(),
        "source": workload.source,
        "hardware": hardware,
        "budget": budget,
        "versions": versions(),
        "search_seconds": time.monotonic() - start,
    }


def context_of(
    workload: Workload, options: SearchOptions, executor: Executor, journal: Path
) -> Context:
    """What the executor finds of machine and workload.

    Raises:
        InputError: an option is wrong; ProbeError: the device cannot be used.
    """
    # Names are checked first, before anything is inspected.
    if options.link is not None:
        link(options.link)
    card = None
    if options.gpu is not None:
        card = card_to_search_for(options.gpu)

    budget_bytes = None
    memory = options.gpu_mem if options.mem is None else options.mem
    if memory is not None:
        budget_bytes = gib_to_bytes(memory)
    found, traits = executor.inspect(workload, options.wanted_device, budget_bytes)
    workload = dataclasses.replace(workload, traits=traits)

    devices = options.devices if isinstance(options.devices, int) else 1
    measured_on = found.of_several(devices, options.nodes, options.link)
    hardware = measured_on
    if card is not None:
        hardware = standing_in_for(measured_on, card)

    requested = None
    if memory is not None or card is not None:  # a request beyond the card means the card
        requested = min(budget_bytes or hardware.memory_bytes, hardware.memory_bytes)

    # A search that goes on keeps its default budget, whatever is free now.
    before, started_with = begun_with(journal)
    if before.get("budget_bytes") != requested:
        started_with = None
    budget = budget_for(options, hardware, started_with)

    if executor.own_ranks is None:
        usable_bytes = budget.cap_bytes(measured_on.device)
        idle_cards = functools.cache(
            functools.partial(executor.idle_cards_like, measured_on, usable_bytes)
        )
        ranks = place_ranks(options.devices, measured_on, idle_cards)
        devices = len(ranks) or devices
        if options.nodes > 1:
            ranks = ()
        placement = place_probes(options.workers, measured_on, idle_cards, len(ranks) or 1)
    else:
        ranks = executor.own_ranks
        placement = Placement()
        devices = executor.devices // options.nodes

    measured_on = measured_on.of_several(devices, options.nodes, options.link)
    hardware = hardware.of_several(devices, options.nodes, options.link)

    _check_host_memory(
        executor, placement, ranks, budget, hardware, options, given=requested is not None
    )
    return Context(
        options=options,
        workload=workload,
        hardware=hardware,
        measured_on=measured_on,
        requested_bytes=requested,
        budget=budget,
        placement=placement,
        ranks=ranks,
        space=space_for(options, workload, hardware),
        budget_notes=tuple(budget_notes(options, hardware, budget)),
    )


def _check_host_memory(
    executor: Executor,
    placement: Placement,
    ranks: tuple[Place, ...],
    budget: Budget,
    hardware: Hardware,
    options: SearchOptions,
    *,
    given: bool,
) -> None:
    """Raise an InputError unless all that train at once on this host fit its memory."""
    free_bytes = int(hardware.host_free_bytes * FREE_FRACTION)
    if placement.cores_of_each:
        who = "workers" if placement.devices == 1 else "devices of all workers"
        check_memory(len(placement.places), who, budget, free_bytes, given=given)
    if executor.sharing > 1:
        check_memory(executor.sharing, "devices of all workers", budget, free_bytes, given=given)
    elif ranks and hardware.device == "cpu":
        check_memory(len(ranks) // options.nodes, "devices", budget, free_bytes, given=True)


def check_memory(count: int, what: str, budget: Budget, free_bytes: int, *, given: bool) -> None:
    """Raise an InputError unless so many can all take the budget of a CPU at once.

    Args:
        what: a word for those who share the memory.
        given: whether the user gave the budget; the default is all that is free, for one alone.
    """
    if given and count * budget.device_bytes <= free_bytes:
        return

    if given:
        message = (
            f"{count} {what} with a budget of {_gib(budget.device_bytes)} GiB each may take more "
            f"than the {_gib(free_bytes)} GiB that can be used here."
        )
    else:
        message = f"{count} {what} share the memory, so the budget of each must be given."
    raise InputError(message, f"Give at most --mem {_gib(free_bytes // count)}, or fewer {what}.")


def _gib(size: int) -> str:
    return f"{int(size / GIB * 100) / 100:.2f}"  # rounded down, so that the user may give it
