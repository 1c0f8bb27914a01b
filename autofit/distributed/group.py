"""The group of ranks that train together: how a process joins it, and whose fault it is when it breaks."""

import os
import re
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autofit.core.errors import InputError, RankError, message_of
from autofit.core.place import Place

TIMEOUT = 600.0  # seconds that one rank waits for another: NCCL's own default
# What a rank says because another one is gone or late: gloo's words, the store's, and NCCL's.
_OF_PEERS = re.compile(
    r"closed by peer|reset by peer|pair closure|Broken pipe|Timed out waiting|socket has timed out|Connection refused"
    r"|communicator was aborted|remote process exited|Watchdog caught|NCCL communicator|Socket closed|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """What a rank says of its error before it ends. `where`: the innermost line that is not PyTorch's."""

    rank: int
    time: float
    where: str
    of_a_peer: bool  # it only says that another rank is gone, late or out of step


Told = TypeVar("Told", bound=Failure)


def take_place(place: Place, device: str) -> None:
    """Choose this process's card, or its share of the cores. Raises InputError where there is no card for it."""
    # What the user's code may ask for, as torchrun sets it.
    names = {"RANK": place.rank, "WORLD_SIZE": place.world}
    names |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_world}
    os.environ.update({name: str(value) for name, value in names.items()})
    if device == "cuda":
        cards = torch.cuda.device_count()
        if place.local_rank >= cards:
            message = (
                f"{place.local_world} ranks are to train on this machine, and it has {cards} cards"
            )
            raise InputError(f"{message}.", "Start one rank for each card.")
        torch.cuda.set_device(place.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world))


@contextmanager
def joined(place: Place, device: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """Be one of the ranks inside. `timeout`: seconds, of each collective. Raises InputError where the machine has fewer
    cards than ranks."""
    take_place(place, device)
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        # Named, the communicator is opened here: its memory is taken before anything is measured.
        options = {
            "backend": "cpu:gloo,cuda:nccl",
            "device_id": torch.device("cuda", place.local_rank),
        }
    limit = timedelta(seconds=timeout)
    given: dict[str, Any] = {
        "rank": place.rank,
        "world_size": place.world,
        "timeout": limit,
        "init_method": place.store,
    }
    dist.init_process_group(**options, **given)
    yield
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are gone


def devices_of_group() -> tuple[int, int]:
    """How many devices train together on each node, and on how many nodes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    devices = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return devices, world // devices


def failure_of(rank: int, error: BaseException) -> Failure:
    """What a rank says of an error that ends it."""
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if "/torch/" not in each.filename
    ]
    where = (
        f"{frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        if frames
        else "its start"
    )
    return Failure(rank, time.monotonic(), where, is_of_a_peer(message_of(error)))


def is_of_a_peer(words: str) -> bool:
    """Whether the last words of a rank only say that another one is gone, late or out of step."""
    return bool(_OF_PEERS.search(words))


def first_cause(failures: Sequence[Told], died: Collection[int]) -> Told | int | None:
    """Why ranks ended: the first error that is not of a peer; else a rank that died; None where none did."""
    own = min(
        (each for each in failures if not each.of_a_peer), key=lambda each: each.time, default=None
    )
    return min(died, default=None) if own is None else own


def stuck(failures: Sequence[Failure], count: int) -> RankError:
    """The error of ranks of which none failed by itself: one says nothing, or all wait for each other."""
    silent = sorted(set(range(count)) - {each.rank for each in failures})
    if silent:
        waited = min(failures, key=lambda each: each.time).where
        return RankError(
            f"rank {silent[0]} of {count} hangs: the others waited for it in {waited}."
        )
    stood = ", ".join(
        f"rank {each.rank} in {each.where}" for each in sorted(failures, key=lambda each: each.rank)
    )
    return RankError(
        f"the ranks waited for each other: {stood}.", "All must do the same in the same order."
    )
