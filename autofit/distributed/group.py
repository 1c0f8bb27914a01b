"""The group of ranks that train together: how a process joins it, and whose fault it is when it breaks."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autofit.core.errors import InputError, message_of
from autofit.core.place import Place

TIMEOUT = 600.0  # seconds that one rank waits for another: NCCL's own default
# What a rank says because another one is gone or late: gloo's words, the store's, and NCCL's.
_OF_PEERS = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Timed out waiting|socket has timed out|Connection refused"
    r"|communicator was aborted|remote process exited|Watchdog caught|NCCL communicator|Socket closed|wait timeout",
    re.IGNORECASE,
)


@contextmanager
def joined(place: Place, device: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """Be one of the ranks inside. `timeout`: seconds, of each collective. Raises InputError where the machine has fewer
    cards than ranks."""
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        cards = torch.cuda.device_count()
        if place.local_rank >= cards:
            message = f"{place.local_world} ranks are to train on this machine, and it has {cards} cards"
            raise InputError(f"{message}.", "Start one rank for each card.")
        torch.cuda.set_device(place.local_rank)
        # Named, the communicator is opened here: its memory is taken before anything is measured.
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", place.local_rank)}
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world))
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


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, late or out of step."""
    return bool(_OF_PEERS.search(message_of(error)))
