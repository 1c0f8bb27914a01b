"""The place of this process among those that train together.

Whoever started it gives it: autofit's own launcher, torchrun, or srun.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.core.files import read_text, write_atomically

_RUN_ID = ".rdzv-id"  # the file that holds it
_ANY_RUN = "none"  # what torchrun calls all runs that --rdzv-id does not name
_FIRST_PORT = 20_000
_PORTS = 40_000
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+))?")  # of "node[03-07],other1"


@dataclass(frozen=True)
class Place:
    """One process among those of a training.

    Attributes:
        rank, world: its number among all, and how many there are.
        local_rank, local_world: the same among those of its machine.
        store: where they meet.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: str = "env://"


def given_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun or a step of srun gives this process; None where it is alone.

    A shell inside of a Slurm allocation has SLURM_NTASKS too, but is no step: it would wait for
    nobody.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank = int(environment["RANK"])
        world = int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
        return Place(rank, world, local_rank, local_world) if world > 1 else None

    if "SLURM_STEP_ID" not in environment:
        return None
    world = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if world < 2:
        return None

    first = _FIRST_HOST.match(environment["SLURM_STEP_NODELIST"])
    assert first is not None, "a list of hosts begins with one"
    host = first[1] + (first[2] or "")
    port = _FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS

    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        world=world,
        local_rank=int(environment["SLURM_LOCALID"]),
        local_world=math.ceil(world / nodes),
        store=f"tcp://{host}:{port}",
    )


def is_started_again(output: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this training before: a process failed, or the nodes changed.

    Nodes that were there count the failures; for others, and where none failed, the directory holds
    the run's --rdzv-id.
    """
    if not output.is_dir():  # not even begun
        return False
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        return True

    name = environment.get("TORCHELASTIC_RUN_ID", _ANY_RUN)
    noted = output / _RUN_ID
    return name != _ANY_RUN and noted.is_file() and read_text(noted) == name


def note_run(output: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Leave the name of torchrun's run in its output directory."""
    if name := environment.get("TORCHELASTIC_RUN_ID"):
        write_atomically(output / _RUN_ID, name)
