"""How many probes of a search run side by side, and where: one on each card, or on its own cores of a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from autofit.core.budget import Budget
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB, Hardware
from autofit.probe import LocalExecutor, Place, on_cards, on_cores, physical_cores


def places_for(
    workers: int | None, hardware: Hardware, executor: LocalExecutor, usable_bytes: int = 0
) -> tuple[Place, ...]:
    """The place of each worker; none where probes run one at a time.

    Args:
        workers: as the user wants; None: one on every idle card that is like card 0, one on a CPU.
        usable_bytes: what a probe may take of a card, which each has to have free.

    Raises:
        InputError: more than there are cards or cores.
    """
    if hardware.device == "cpu":
        return on_cores(workers) if workers and workers > 1 else ()
    if workers == 1:
        return ()
    cards = _cards_like(hardware, executor, usable_bytes)
    if workers and workers > len(cards):
        found = f"{len(cards)} of the visible cards {'is' if len(cards) == 1 else 'are'} an idle {hardware.name}"
        raise InputError(f"{workers} workers need a card each like card 0, and {found}.", "Give fewer workers.")
    return on_cards(cards[:workers]) if len(cards) > 1 else ()


def check_memory(places: Sequence[Place], budget: Budget, free_bytes: int, *, given: bool) -> None:
    """On a CPU every worker may take the whole budget, at the same time.

    Raises:
        InputError: that is more than may be used, or no budget was `given`, and the default is all that may be.
    """
    count = sum(bool(place.cores) for place in places)
    if not count or (given and count * budget.device_bytes <= free_bytes):
        return
    most = f"Give at most --mem {_gib(free_bytes // count)}, or fewer workers."
    if not given:
        raise InputError(f"{count} workers share the memory, so the budget of each must be said.", most)
    wanted = f"{count} workers with a budget of {_gib(budget.device_bytes)} GiB each"
    raise InputError(f"{wanted} may take more than the {_gib(free_bytes)} GiB that can be used here.", most)


def cores_of_each(places: Sequence[Place]) -> int | None:
    """How many cores each worker's probes run on; None where that is all there are."""
    return places[0].cores or None if places else None


def seen_by_each(places: Sequence[Place], hardware: Hardware) -> Hardware:
    """The hardware as a worker's probes have it."""
    processors = len(places[0].processors) if places else 0
    return dataclasses.replace(hardware, cores=processors or hardware.cores)


def described(places: Sequence[Place], hardware: Hardware) -> str:
    """Where probes run, in a sentence."""
    cores = cores_of_each(places)
    if cores is None:
        return f"{len(places)} probes run at a time, each on a card of its own ({hardware.name})."
    return (
        f"{len(places)} probes run at a time, each on {cores} of {len(physical_cores())} cores; "
        "whatever may be the best is measured again on all of them, alone."
    )


def explored(places: Sequence[Place]) -> str:
    """What a result says of measurements on fewer cores than its best was verified on."""
    return (
        f"Explored {len(places)} probes at a time, each on {cores_of_each(places)} of {len(physical_cores())} cores; "
        "what is verified was measured on all cores."
    )


def _cards_like(hardware: Hardware, executor: LocalExecutor, usable_bytes: int) -> list[str]:
    """Card 0 and the visible ones that equal it, that nobody else uses, and that a desktop leaves enough of."""
    cards = executor.cards()
    alike = list(cards[:1])
    for card in cards[1:]:
        with contextlib.suppress(ProbeError):  # used by others, or broken
            seen = executor.detect_idle(card)
            same = (seen.name, seen.memory_bytes) == (hardware.name, hardware.memory_bytes)
            if same and seen.memory_bytes - seen.used_bytes >= usable_bytes:
                alike.append(card)
    return alike


def _gib(size: int) -> str:
    return f"{int(size / GIB * 100) / 100:.2f}"  # rounded down: what is told may be given
