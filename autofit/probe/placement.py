"""Where a worker's probes run when several run side by side: on a card of its own, or on cores of its own.

A place is laid down for the worker's zygote before that starts, because OpenMP, MKL and CUDA look around once, when
they are loaded. All places of a search are alike, so that what is measured in one can be compared with another's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.core.errors import InputError, counted

_TOPOLOGY = Path("/sys/devices/system/cpu")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Place:
    """One worker's share of the machine.

    Attributes:
        number: from 0.
        card: what CUDA_VISIBLE_DEVICES calls it; None: all that are visible.
        processors: by the system's numbers; empty: all.
        cores: how many physical ones those belong to; 0: all.
    """

    number: int
    card: str | None = None
    processors: frozenset[int] = frozenset()
    cores: int = 0

    def lay_down(self, environment: MutableMapping[str, str]) -> None:
        """Set what the libraries of a process that starts here read."""
        if self.card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.card
        if self.cores:
            for name in _THREADS:  # one a core, as PyTorch has it by itself, unless the user wants fewer
                asked = environment.get(name, "")
                environment[name] = str(min(self.cores, int(asked)) if asked.isdecimal() else self.cores)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What the calling thread starts meanwhile is bound to the processors from its first instruction on."""
        if not self.processors:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.processors)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def on_cards(cards: Sequence[str]) -> tuple[Place, ...]:
    """A place on each of some cards, called as CUDA_VISIBLE_DEVICES calls them."""
    return tuple(Place(number, card=card) for number, card in enumerate(cards))


def on_cores(count: int) -> tuple[Place, ...]:
    """So many places, each with as many whole cores of this process; those that are left over stay idle.

    Raises:
        InputError: there are fewer cores than places.
    """
    cores = physical_cores()
    share = len(cores) // count
    if not share:
        have = counted(len(cores), "core")
        raise InputError(f"{count} workers need a core each, and this process may use {have}.", "Give fewer workers.")
    return tuple(
        Place(number, processors=frozenset().union(*cores[number * share : (number + 1) * share]), cores=share)
        for number in range(count)
    )


def physical_cores(topology: Path = _TOPOLOGY) -> list[frozenset[int]]:
    """The processors of each core that this process may use, socket by socket."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(topology, each) & allowed for each in allowed}
    return sorted(cores, key=lambda core: (_socket(topology, min(core)), min(core)))


def _socket(topology: Path, processor: int) -> int:
    text = _read(topology / f"cpu{processor}" / "topology" / "physical_package_id")
    return int(text) if text.isdecimal() else 0


def _siblings(topology: Path, processor: int) -> frozenset[int]:
    """The processors of the same core, from text such as `0,64` or `0-1`; itself alone where the system tells none."""
    text = _read(topology / f"cpu{processor}" / "topology" / "thread_siblings_list")
    found = {processor}
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # not every system tells
        return ""
