"""The group of ranks that train together: which place in it is this process's, and whose fault it is when it breaks.

A place is given by whoever started the process: autofit's own launcher, torchrun, or srun.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autofit.core.errors import InputError, message_of

TIMEOUT = 600.0  # seconds that one rank waits for another: NCCL's own default
# What a rank says because another one is gone or late: gloo's words, the store's, and NCCL's.
_OF_PEERS = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Timed out waiting|socket has timed out|Connection refused"
    r"|communicator was aborted|remote process exited|Watchdog caught|NCCL communicator|Socket closed|wait timeout",
    re.IGNORECASE,
)
_FIRST_PORT, _PORTS = 20_000, 40_000
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+))?")  # of "node[03-07],other1"


@dataclass(frozen=True)
class Place:
    """One process among those of a training. `local_...`: among those of its machine; `store`: where they meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: str = "env://"


def given_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun or a step of srun gives this process; None where it is alone.

    A shell inside of a Slurm allocation has SLURM_NTASKS too, but is no step: it would wait for nobody.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", world))
        return Place(rank, world, *local) if world > 1 else None
    if "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    rank, world = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    first = _FIRST_HOST.match(environment["SLURM_STEP_NODELIST"])
    assert first is not None, "a list of hosts begins with one"
    host = first[1] + (first[2] or "")
    port = _FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    return Place(rank, world, int(environment["SLURM_LOCALID"]), -(-world // nodes), f"tcp://{host}:{port}")


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
