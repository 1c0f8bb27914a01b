"""Where probes run when several run at once: each on a card of its own, or on cores of its own.

A zygote is placed before it starts, because OpenMP, MKL and CUDA read their settings once, when they are loaded. All
places of a search are alike, so that measurements in one can be compared with another's.
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
    """One worker's share of the machine."""

    number: int  # from 0
    card: str | None = None  # what CUDA_VISIBLE_DEVICES calls it; None: all that are visible
    processors: frozenset[int] = frozenset()  # by the system's numbers; empty: all
    cores: int = 0  # how many physical ones those belong to; 0: all

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables that a process placed here reads."""
        if self.card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.card
        if self.cores:
            # one a core, as PyTorch has it by itself, unless the user wants fewer
            for name in _THREADS:
                asked = environment.get(name, "")
                environment[name] = str(
                    min(self.cores, int(asked)) if asked.isdecimal() else self.cores
                )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Bind the calling thread to the processors, so that a process started inside is bound from the start."""
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
    """Where the probes of a search run: one at a time in each of some places, or in each `devices` of them that train
    together; no places: one at a time, anywhere."""

    places: tuple[Place, ...] = ()
    devices: int = 1

    @property
    def cores_of_each(self) -> int | None:
        """The cores of each place's probes; None where they have all that there are."""
        return self.places[0].cores or None if self.places else None

    def hardware(self, whole: Hardware) -> Hardware:
        """The hardware as a probe sees it."""
        processors = len(self.places[0].processors) if self.places else 0
        return dataclasses.replace(whole, cores=processors or whole.cores)

    def describe(self, hardware: Hardware) -> str | None:
        """A sentence on where probes run; None where that is anywhere."""
        if not self.places:
            return None
        if self.cores_of_each is None:
            own = "a card of its own" if self.devices == 1 else f"{self.devices} cards of its own"
            alone = (
                "" if self.devices == 1 else "; whatever may be the best is measured again alone"
            )
            return (
                f"{self._at_once()} probes run at a time, each on {own} ({hardware.name}){alone}."
            )
        where = f"{self._at_once()} probes run at a time, each on {self._cores()}"
        return f"{where}; whatever may be the best is measured again on all of them, alone."

    def describe_measurements(self) -> str | None:
        """A sentence on what explored measurements mean beside verified ones; None where both had all cores."""
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
    """The placement that a number of workers means on this hardware; an InputError for fewer cards or cores.

    Args:
        workers: None: as many as there are idle cards for, one on a CPU.
        devices: that each of them takes.
        idle_cards: the cards like card 0 that a probe can use, as CUDA_VISIBLE_DEVICES calls them, that one first.
    """
    if workers == 1 or (workers is None and hardware.device == "cpu"):
        return Placement()
    count = workers and workers * devices
    if devices > 1 and count is None:
        count = len(idle_cards()) // devices * devices
    what = f"{workers} workers" + (f" of {devices} devices" if devices > 1 else "")
    places = _places(count, hardware, idle_cards, what)
    return Placement(places, devices) if len(places) > devices else Placement()


def place_ranks(
    devices: int | str, hardware: Hardware, idle_cards: Callable[[], Sequence[str]]
) -> tuple[Place, ...]:
    """A place for each of the devices that train together, "all" meaning the cards; none for a device alone, nor where
    there are fewer cards or cores: one stands for all then. Raises InputError for all of a CPU."""
    if devices == 1:
        return ()
    if hardware.device == "cpu" and devices == ALL:
        raise InputError(
            "--devices all means cards, and the device is the CPU.", "Give a number: --devices 2."
        )
    count = devices if isinstance(devices, int) else None
    if count and count > (
        len(idle_cards()) if hardware.device == "cuda" else len(physical_cores())
    ):
        return ()
    places = _places(count, hardware, idle_cards)
    return places if len(places) > 1 else ()


def _places(
    count: int | None, hardware: Hardware, idle_cards: Callable[[], Sequence[str]], what: str = ""
) -> tuple[Place, ...]:
    """So many places on cards, None for all of them, or as many whole cores for each; those left over stay idle. `what`
    needs them, for messages."""
    if hardware.device == "cuda":
        cards = idle_cards()
        if count and count > len(cards):
            found = f"{len(cards)} of the visible cards {'is' if len(cards) == 1 else 'are'} an idle {hardware.name}"
            raise InputError(
                f"{what} need a card each like card 0, and {found}.", "Give fewer workers."
            )
        return tuple(Place(number, card=card) for number, card in enumerate(cards[:count]))
    assert count, "a CPU is divided by a number"
    cores = physical_cores()
    share = len(cores) // count
    if not share:
        message = (
            f"{what} need a core each, and this process may use {pluralize(len(cores), 'core')}."
        )
        raise InputError(message, "Give fewer workers.")
    shares = [
        frozenset().union(*cores[number * share : (number + 1) * share]) for number in range(count)
    ]
    return tuple(Place(number, processors=each, cores=share) for number, each in enumerate(shares))


def physical_cores(topology: Path = _TOPOLOGY) -> list[frozenset[int]]:
    """The processors of each core that this process may use, socket by socket."""
    allowed = os.sched_getaffinity(0)

    def socket(core: frozenset[int]) -> int:
        text = _read(topology / f"cpu{min(core)}" / "topology" / "physical_package_id")
        return int(text) if text.isdecimal() else 0

    return sorted(
        {_siblings(topology, each) & allowed for each in allowed},
        key=lambda core: (socket(core), min(core)),
    )


def _siblings(topology: Path, processor: int) -> frozenset[int]:
    """The processors of the same core, from text such as `0,64` or `0-1`; itself alone where the system is silent."""
    text = _read(topology / f"cpu{processor}" / "topology" / "thread_siblings_list")
    found = {processor}
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # not every system has the file
        return ""
