"""Where probes run when several run at once: each on a card of its own, or on cores of its own.

A zygote is placed before it starts, because OpenMP, MKL and CUDA read their settings once, when
they are loaded. All places of a search are alike, so that measurements in one can be compared with
another's.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.core.errors import InputError, pluralize
from autofit.core.hardware import Hardware
from autofit.core.options import ALL

_TOPOLOGY = Path("/sys/devices/system/cpu")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Place:
    """One worker's share of the machine.

    Attributes:
        number: from 0.
        card: what CUDA_VISIBLE_DEVICES calls it; None for all that are visible.
        processors: by the system's numbers; empty for all.
        cores: how many physical ones those belong to; 0 for all.
    """

    number: int
    card: str | None = None
    processors: frozenset[int] = frozenset()
    cores: int = 0

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables that a process placed here reads."""
        if self.card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.card

        if self.cores:
            # One thread a core, as PyTorch has it by itself, unless the user wants fewer.
            for name in _THREADS:
                threads = self.cores
                asked = environment.get(name, "")
                if asked.isdecimal():
                    threads = min(threads, int(asked))
                environment[name] = str(threads)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Bind the calling thread to the processors, so that a process started inside is bound from
        the start."""
        if not self.processors:
            yield
            return

        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.processors)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Placement:
    """Where the probes of a search run: one at a time in each of some places, or in each `devices`
    of them that train together. Without places it is one at a time, anywhere."""

    places: tuple[Place, ...] = ()
    devices: int = 1

    @property
    def cores_of_each(self) -> int | None:
        """The cores of each place's probes; None where they have all that there are."""
        if not self.places:
            return None
        return self.places[0].cores or None

    def hardware(self, whole: Hardware) -> Hardware:
        """The hardware as a probe sees it."""
        if not self.places or not self.places[0].processors:
            return whole
        return dataclasses.replace(whole, cores=len(self.places[0].processors))

    def describe(self, hardware: Hardware) -> str | None:
        """A sentence on where probes run; None where that is anywhere."""
        if not self.places:
            return None

        text = f"{self._at_once()} probes run at a time, each on "
        if self.cores_of_each is not None:
            text += f"{self._cores()}; whatever may be the best is measured again on all of them, "
            return text + "alone."

        if self.devices == 1:
            return text + f"a card of its own ({hardware.name})."
        text += f"{self.devices} cards of its own ({hardware.name}); whatever may be the best is "
        return text + "measured again alone."

    def describe_measurements(self) -> str | None:
        """A sentence on what explored measurements mean beside verified ones.

        None where both had all cores.
        """
        if self.cores_of_each is None:
            return None

        where = f"{self._at_once()} probes at a time, each on {self._cores()}"
        return f"Explored {where}; verified measurements are on all cores."

    def _at_once(self) -> int:
        return len(self.places) // self.devices

    def _cores(self) -> str:
        return f"{self.places[0].cores * self.devices} of {len(physical_cores())} cores"


def place_probes(
    workers: int | None,
    hardware: Hardware,
    idle_cards: Callable[[], Sequence[str]],
    devices: int = 1,
) -> Placement:
    """The placement that a number of workers means on this hardware.

    Raises InputError where there are fewer cards or cores.

    Args:
        workers: None for as many as there are idle cards for, one on a CPU.
        idle_cards: the cards like card 0 that a probe can use, as CUDA_VISIBLE_DEVICES calls them,
            that one first.
        devices: that each worker takes.
    """
    if workers == 1 or (workers is None and hardware.device == "cpu"):
        return Placement()

    count = workers and workers * devices
    what = f"{workers} workers"
    if devices > 1:
        what += f" of {devices} devices"
        if count is None:
            count = len(idle_cards()) // devices * devices

    places = _places(count, hardware, idle_cards, what)
    if len(places) <= devices:
        return Placement()
    return Placement(places, devices)


def place_ranks(
    devices: int | str, hardware: Hardware, idle_cards: Callable[[], Sequence[str]]
) -> tuple[Place, ...]:
    """A place for each of the devices that train together.

    None for a device alone, nor where there are fewer cards or cores: one stands for all then.
    Raises InputError for "all" of a CPU.

    Args:
        devices: their number, or "all" for the cards.
    """
    if devices == 1:
        return ()

    if hardware.device == "cpu" and devices == ALL:
        raise InputError(
            "--devices all means cards, and the device is the CPU.", "Give a number: --devices 2."
        )

    count = None
    if isinstance(devices, int):
        count = devices
        there = idle_cards() if hardware.device == "cuda" else physical_cores()
        if count > len(there):
            return ()

    places = _places(count, hardware, idle_cards)
    return places if len(places) > 1 else ()


def _places(
    count: int | None, hardware: Hardware, idle_cards: Callable[[], Sequence[str]], what: str = ""
) -> tuple[Place, ...]:
    """So many places on cards, or on as many whole cores each; cores left over stay idle.

    Args:
        count: None for all cards.
        what: needs them, for messages.
    """
    if hardware.device == "cuda":
        cards = idle_cards()
        if count and count > len(cards):
            verb = "is" if len(cards) == 1 else "are"
            raise InputError(
                f"{what} need a card each like card 0, and {len(cards)} of the visible cards "
                f"{verb} an idle {hardware.name}.",
                "Give fewer workers.",
            )
        return tuple(Place(number, card=card) for number, card in enumerate(cards[:count]))

    assert count, "a CPU is divided by a number"
    cores = physical_cores()
    share = len(cores) // count
    if not share:
        raise InputError(
            f"{what} need a core each, and this process may use {pluralize(len(cores), 'core')}.",
            "Give fewer workers.",
        )

    places = []
    for number in range(count):
        own = cores[number * share : (number + 1) * share]
        places.append(Place(number, processors=frozenset().union(*own), cores=share))
    return tuple(places)


def physical_cores(topology: Path = _TOPOLOGY) -> list[frozenset[int]]:
    """The processors of each core that this process may use, socket by socket."""
    allowed = os.sched_getaffinity(0)

    def socket(core: frozenset[int]) -> int:
        text = _read(topology / f"cpu{min(core)}" / "topology" / "physical_package_id")
        return int(text) if text.isdecimal() else 0

    cores = {_siblings(topology, processor) & allowed for processor in allowed}
    return sorted(cores, key=lambda core: (socket(core), min(core)))


def _siblings(topology: Path, processor: int) -> frozenset[int]:
    """The processors of the same core, from text such as `0,64` or `0-1`; itself alone where the
    system is silent."""
    text = _read(topology / f"cpu{processor}" / "topology" / "thread_siblings_list")
    found = {processor}
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # not every system has the file
        return ""
