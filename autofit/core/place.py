"""The place of this process among those that train together, which whoever started it gives:
autofit's own launcher, torchrun, or srun."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.core.files import read_text, write_atomically

_RUN_ID, _ANY_RUN = ".rdzv-id", "none"  # what torchrun calls all runs that --rdzv-id does not name
_FIRST_PORT, _PORTS = 20_000, 40_000
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+))?")  # of "node[03-07],other1"


@dataclass(frozen=True)
class Place:
    """One process among those of a training. `local_...`: among those of its machine; `store`:
    where they meet."""

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


def is_started_again(output: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this training before: a process failed, or a node was lost or has
    joined. Nodes that were there count the failures; for others, and where none failed, the
    directory holds the run's --rdzv-id."""
    if not output.is_dir():  # not even begun
        return False
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        return True
    name, noted = environment.get("TORCHELASTIC_RUN_ID", _ANY_RUN), output / _RUN_ID
    return name != _ANY_RUN and noted.is_file() and read_text(noted) == name


def note_run(output: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Leave the name of torchrun's run in its output directory."""
    if name := environment.get("TORCHELASTIC_RUN_ID"):
        write_atomically(output / _RUN_ID, name)
