"""The group of ranks that train together: how a process joins it, and whose fault it is when it
breaks."""

import os
import re
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from autofit.core.errors import InputError, RankError, message_of
from autofit.core.place import Place

TIMEOUT = 600.0  # seconds that one rank waits for another: NCCL's own default
# What a rank says because another one is gone or late: gloo's words, the store's, and NCCL's.
_OF_PEERS = re.compile(
    r"closed by peer|reset by peer|pair closure|Broken pipe|Timed out waiting|socket has timed out"
    r"|Connection refused|communicator was aborted|remote process exited|Watchdog caught"
    r"|NCCL communicator|Socket closed|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """What a rank says of its error before it ends.

    Attributes:
        time: by time.monotonic().
        where: the innermost line that is not PyTorch's.
        of_a_peer: whether it only says that another rank is gone, late or out of step.
    """

    rank: int
    time: float
    where: str
    of_a_peer: bool


Told = TypeVar("Told", bound=Failure)


def take_place(place: Place, device: str) -> None:
    """Choose this process's card, or its share of the cores.

    Raises InputError where there is no card for it.
    """
    # What the user's code may ask for, as torchrun sets it.
    os.environ["RANK"] = str(place.rank)
    os.environ["WORLD_SIZE"] = str(place.world)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world)

    if device == "cuda":
        cards = torch.cuda.device_count()
        if place.local_rank >= cards:
            raise InputError(
                f"{place.local_world} ranks are to train on this machine, and it has {cards} "
                "cards.",
                "Start one rank for each card.",
            )
        torch.cuda.set_device(place.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world))


@contextmanager
def joined(place: Place, device: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """Be one of the ranks inside.

    Raises InputError where the machine has fewer cards than ranks.

    Args:
        timeout: seconds of each collective.
    """
    take_place(place, device)
    backend = "gloo"
    device_id = None
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        # Where it is named, the communicator is opened here: its memory is taken before anything is
        # measured.
        device_id = torch.device("cuda", place.local_rank)

    dist.init_process_group(
        backend,
        init_method=place.store,
        timeout=timedelta(seconds=timeout),
        world_size=place.world,
        rank=place.rank,
        device_id=device_id,
    )
    yield
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are gone


def devices_of_group() -> tuple[int, int]:
    """How many devices train together on each node, and on how many nodes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    devices = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return devices, world // devices


def failure_of(rank: int, error: BaseException) -> Failure:
    """What a rank says of an error that ends it."""
    where = "its start"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename:
            where = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
            break
    return Failure(rank, time.monotonic(), where, is_of_a_peer(message_of(error)))


def is_of_a_peer(words: str) -> bool:
    """Whether the last words of a rank only say that another one is gone, late or out of step."""
    return bool(_OF_PEERS.search(words))


def first_cause(failures: Sequence[Told], died: Collection[int]) -> Told | int | None:
    """Why ranks ended: the first error that is not of a peer; else a rank that died.

    None where none died.
    """
    own = [failure for failure in failures if not failure.of_a_peer]
    if own:
        return min(own, key=attrgetter("time"))
    return min(died, default=None)


def stuck(failures: Sequence[Failure], count: int) -> RankError:
    """The error of ranks of which none failed by itself: one says nothing, or all wait for each
    other."""
    where = {failure.rank: failure.where for failure in failures}
    for rank in range(count):
        if rank not in where:
            waited = min(failures, key=attrgetter("time")).where
            return RankError(f"rank {rank} of {count} hangs: the others waited for it in {waited}.")

    stood = ", ".join(f"rank {rank} in {where[rank]}" for rank in range(count))
    return RankError(
        f"the ranks waited for each other: {stood}.", "All must do the same in the same order."
    )
