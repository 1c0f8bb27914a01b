"""How files of tools on accelerate divide a training: by FSDP, by DeepSpeed, or by a file that
accelerate launches processes by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.files import read_text
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.strict_yaml import parse
from autofit.export.importers.command_line import ENVIRONMENT, LAUNCHER
from autofit.export.importers.deepspeed import Zero, division_by, read_zero
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.importers.fsdp import checkpoints, read_fsdp
from autofit.export.tool import nested

Keys = Mapping[str, Any]

_MOST_BYTES = 2**20  # of a file
_DEGREES = "parallelism_config.parallelism_config_"
_SIZES = {  # of accelerate's file
    f"{_DEGREES}dp_replicate_size": "data_parallel_replicate",
    f"{_DEGREES}dp_shard_size": "data_parallel_shard",
    f"{_DEGREES}tp_size": "tensor_parallel",
    f"{_DEGREES}cp_size": "context_parallel",
}
_SHARD = "data_parallel_shard"
# What starts a command may say how many devices of each machine there are, of all, and machines.
LAUNCHED_BY = f"{LAUNCHER}config_file"
_PROCESSES = (f"{ENVIRONMENT}NPROC_PER_NODE", f"{LAUNCHER}nproc_per_node")
_OF_ALL = f"{LAUNCHER}num_processes"
_MACHINES = (f"{ENVIRONMENT}NNODES", f"{LAUNCHER}nnodes", f"{LAUNCHER}num_machines")
_OF_LAUNCHER = (f"{LAUNCHER}use_fsdp", f"{LAUNCHER}use_deepspeed")


def divided_by_trainer(
    keys: Keys,
    folder: Path,
    version: int = 2,
    *,
    by_config: bool = False,
    sizes: Mapping[str, str] | None = None,
) -> Division:
    """How a file with arguments of transformers' Trainer divides a training.

    Args:
        folder: where the file is.
        version, by_config: as of `read_fsdp`.
        sizes: the keys of degrees, with the knob of each.

    Raises:
        InputError: a value is not known, or cannot be predicted.
    """
    settings = _below(keys, "deepspeed")
    by_fsdp = read_fsdp(keys, folder, version, by_config=by_config)
    if settings and by_fsdp:
        raise InputError("both deepspeed and fsdp are asked for.", "Leave one of them.")
    division = by_fsdp or Division()
    if settings:
        division = division_by(read_zero(settings, folder))

    return _with_sizes(division, keys, sizes or {})


def read_launcher(name: str, folder: Path) -> Division:
    """How a file for `accelerate launch --config_file` divides a training.

    Args:
        name: its path, as the command says it.
        folder: where the file with the command is; a path is looked for there first, then where
            autofit runs.

    Raises:
        InputError: it cannot be read, or a value is not known.
    """
    path = folder / name
    if not path.exists():
        path = Path(name)
    try:
        value = parse(read_text(path, most=_MOST_BYTES), path.name)
    except FileNotFoundError as error:
        message = f"it launches by {path.name}, which is not there."
        remedy = f"Put {path} beside the file, or run autofit where the command is run."
        raise InputError(message, remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text.", "Give accelerate's file.") from error

    if not isinstance(value, dict):
        raise InputError(f"{path} holds no values by name.", "Give accelerate's file.")

    return divided_by_launcher(flat(value), path.parent)


def divided_by_launcher(keys: Keys, folder: Path) -> Division:
    """The same by the keys of such a file, which stays as it is, and the folder that it is in.

    Raises:
        InputError: a value is not known.
    """
    kind = keys.get("distributed_type")
    division = Division()
    if kind == "FSDP":
        division = read_fsdp(keys, folder, 1, by_config=True) or division
    elif kind == "DEEPSPEED":
        own = keys.get("deepspeed_config.deepspeed_config_file")
        zero = read_zero(own, folder) if own else _zero(keys)
        division = division_by(zero)

    division = _with_sizes(division.closed(), keys, _SIZES)
    if checkpoints(keys) is not None:  # whatever the keys of the tool say
        division = replace(
            division,
            knobs={**division.knobs, CHECKPOINTING.name: "full"},
            holds=(*division.holds, CHECKPOINTING.name),
        )

    nodes = keys.get("num_machines")
    if not is_whole(nodes, 1):
        nodes = 1
    processes = keys.get("num_processes")  # of all machines
    if is_whole(processes, nodes):
        processes //= nodes

    return with_devices(replace(division, nodes=nodes), processes)


def launched(division: Division, keys: Keys) -> Division:
    """The same on as many machines and devices as what starts a command says.

    Raises:
        InputError: it divides weights by options of its own.
    """
    for option in _OF_LAUNCHER:
        if keys.get(option):
            name = option.removeprefix(LAUNCHER)
            message = f"accelerate launch --{name}: its options are not read."
            raise InputError(message, "Write them to a file, and launch by --config_file.")

    nodes = division.nodes
    machines = _first_of(_MACHINES, keys)
    if machines is not None:
        nodes = machines if is_whole(machines, 1) else None

    processes = _first_of(_PROCESSES, keys)
    of_all = keys.get(_OF_ALL)
    if nodes is not None and is_whole(of_all, nodes):
        processes = of_all // nodes

    return with_devices(replace(division, nodes=nodes), processes)


def _first_of(names: Sequence[str], keys: Keys) -> Any:
    """What the first of several keys says that is set; None where none is."""
    for name in names:
        if keys.get(name):
            return keys[name]

    return None


def with_devices(division: Division, processes: Any) -> Division:
    """The same with a number of processes, if it is one."""
    if not is_whole(processes, 1):
        return division
    return replace(division, devices=processes)


def _zero(keys: Keys) -> Zero:
    """ZeRO by accelerate's own keys, as DeepSpeed's settings would say it."""
    section = "deepspeed_config"
    settings = {
        "stage": keys.get(f"{section}.zero_stage"),
        "offload_optimizer": keys.get(f"{section}.offload_optimizer_device"),
        "offload_param": keys.get(f"{section}.offload_param_device"),
    }
    accumulation = keys.get(f"{section}.gradient_accumulation_steps")
    whole = {"zero_optimization": settings, "gradient_accumulation_steps": accumulation}
    return read_zero(whole, Path())


def _with_sizes(division: Division, keys: Keys, sizes: Mapping[str, str]) -> Division:
    """The same with the degrees that a file says, and with the number of devices where they make
    it."""
    degrees: dict[str, int] = {}
    for key, knob in sizes.items():
        value = keys.get(key)
        if value in (None, 0):
            continue
        if not is_whole(value, 1):
            raise InputError(f"{key} must be a whole number, not {shown(value)}.", "Correct it.")

        degrees[knob] = value
        if value > 1 and division.knobs.get("data_parallel") != "fsdp":
            message = f"{key}: without FSDP or ZeRO-3 it is not predicted."
            raise InputError(message, f"Leave {key} out, or divide weights as well.")

    if degrees.get(_SHARD, 1) > 1:
        division = replace(division, devices=math.prod(degrees.values()))

    degrees.pop(_SHARD, None)
    return replace(division, knobs={**division.knobs, **degrees})


def _below(keys: Keys, key: str) -> Any:
    """The value of a key, which may be a mapping."""
    prefix = f"{key}."
    inner = {name: value for name, value in keys.items() if name.startswith(prefix)}
    if not inner:
        return keys.get(key)
    return nested(inner)[key]
