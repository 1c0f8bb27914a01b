"""How files of tools on accelerate divide a training: by FSDP, by DeepSpeed, or by a file that accelerate
launches processes by."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.files import read_text
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.strict_yaml import parse
from autofit.export.importers.deepspeed import Zero, division_by, read_zero
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.importers.fsdp import checkpoints, read_fsdp
from autofit.export.tool import nested

Keys = Mapping[str, Any]

_MOST_BYTES = 2**20  # of a file
_SIZES = {  # of accelerate's file
    f"parallelism_config.parallelism_config_{name}_size": knob
    for name, knob in {
        "dp_replicate": "data_parallel_replicate",
        "dp_shard": "data_parallel_shard",
        "tp": "tensor_parallel",
        "cp": "context_parallel",
    }.items()
}
_SHARD = "data_parallel_shard"


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
    division = Division()
    if keys.get("distributed_type") == "FSDP":
        division = read_fsdp(keys, folder, 1, by_config=True) or division
    elif keys.get("distributed_type") == "DEEPSPEED":
        own = keys.get("deepspeed_config.deepspeed_config_file")
        division = division_by(read_zero(own, folder) if own else _zero(keys))

    division = _with_sizes(division.closed(), keys, _SIZES)
    if checkpoints(keys) is not None:  # whatever the keys of the tool say
        knobs = {**division.knobs, CHECKPOINTING.name: "full"}
        division = replace(
            division,
            knobs=knobs,
            holds=(*division.holds, CHECKPOINTING.name),
        )

    machines = keys.get("num_machines", 1)
    nodes = machines if is_whole(machines, 1) else 1
    processes = keys.get("num_processes")  # of all machines
    if is_whole(processes, nodes):
        processes //= nodes

    return with_devices(replace(division, nodes=nodes), processes)


def with_devices(division: Division, processes: Any) -> Division:
    """The same with a number of processes, if it is one."""
    return replace(division, devices=processes) if is_whole(processes, 1) else division


def _zero(keys: Keys) -> Zero:
    """ZeRO by accelerate's own keys, as DeepSpeed's settings would say it."""
    said = {
        name: keys.get(f"deepspeed_config.{name}")
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device")
    }
    accumulation = keys.get("deepspeed_config.gradient_accumulation_steps")
    settings = {
        "stage": said["zero_stage"],
        "offload_optimizer": said["offload_optimizer_device"],
        "offload_param": said["offload_param_device"],
    }
    whole = {"zero_optimization": settings, "gradient_accumulation_steps": accumulation}

    return read_zero(whole, Path())


def _with_sizes(division: Division, keys: Keys, sizes: Mapping[str, str]) -> Division:
    """The same with the degrees that a file says, and with the number of devices where they make it."""
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

    named = {knob: value for knob, value in degrees.items() if knob != _SHARD}
    division = replace(division, knobs={**division.knobs, **named})
    if degrees.get(_SHARD, 1) > 1:
        division = replace(division, devices=math.prod(degrees.values()))

    return division


def _below(keys: Keys, key: str) -> Any:
    """The value of a key, which may be a mapping."""
    prefix = f"{key}."
    inner = {name: value for name, value in keys.items() if name.startswith(prefix)}

    return nested(inner)[key] if inner else keys.get(key)
