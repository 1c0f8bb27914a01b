"""The place of this process among those that train together, which whoever started it gives: autofit's own launcher,
torchrun, or srun."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
