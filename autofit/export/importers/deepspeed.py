"""DeepSpeed's settings, as files of other tools name them: which stage of ZeRO, what is offloaded,
and as which division autofit predicts that.

Tools take a path of a JSON file, its contents, or a short name. Published files are known by their
names, because people keep those and rarely keep the files beside the YAML.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from autofit.core.config import Value
from autofit.core.errors import InputError, is_whole, shown
from autofit.core.files import read_text
from autofit.export.importers.division import Division

_MOST_BYTES = 2**20  # of a file
_NAME = re.compile(r"(?:ds_)?z(?:ero)?[-_]?([0-3])((?:[-_][a-z0-9]+)*)")
# Words of published names that change neither what is divided nor what is offloaded.
_NO_MATTER = ("config", "bf16", "fp16", "fp8", "torch", "compile")
_OFFLOADS = ("offload", "cpuoffload")
# Where axolotl's files are, of which each of stage 2 offloads the optimizer, whatever its name.
_OF_AXOLOTL = "deepspeed_configs"
# What DeepSpeed demands to be the same in its own settings and in those of the tool.
_SIZES = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_LARGE = 10**8  # elements of a bucket; DeepSpeed's own has 5e8
_BUCKETS = "the buckets that it collects gradients in take 1 to 2 GB on top"


@dataclass(frozen=True)
class Zero:
    """What DeepSpeed divides over the devices, and what it keeps in the host's memory.

    Attributes:
        stage: 1 divides the optimizer's state, 2 gradients as well, 3 weights as well; 0 nothing.
        has_sizes: the settings hold batch sizes of their own, so those of the tool's file must
            stay.
        has_large_buckets: gradients are collected in buckets of DeepSpeed's own size, or nearly so
            large.
    """

    stage: int
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    has_sizes: bool = False
    has_large_buckets: bool = False


def read_zero(value: Any, folder: Path) -> Zero:
    """What the value of a key such as `deepspeed` stands for.

    Args:
        value: a path, a short name such as zero3_offload, or the settings themselves as a mapping.
        folder: where the file is that has the key; a path is looked for there first.

    Raises:
        InputError: there is no such file and no published one of that name, or its settings are not
            known.
    """
    if isinstance(value, Mapping):
        return _of_settings(value, "deepspeed")
    if not isinstance(value, str) or "\0" in value:
        raise InputError(
            f"deepspeed: {shown(value)} is neither a path, a name nor a mapping.", "Correct it."
        )

    for path in (folder / value, Path(value)):
        with contextlib.suppress(OSError):  # of what can be no path
            if path.suffix == ".json" and path.is_file():
                return _of_settings(_settings_in(path), f"deepspeed: {path.name}")

    found = _of_name(value)
    if found is None:
        raise InputError(
            f"deepspeed: {shown(value)} is not beside the file, and no published name of settings.",
            "Put the JSON file where the path says.",
        )

    return found


def division_by(zero: Zero) -> Division:
    """As what autofit predicts it. The keys of DeepSpeed stay, so nothing of it is open."""
    holds: tuple[str, ...] = (
        "compile",
        "optimizer",
        "optimizer_offload",
        "parameter_offload",
    )
    if zero.has_sizes:
        holds += ("micro_batch_size", "gradient_accumulation_steps")

    if zero.stage < 2:
        note = "DeepSpeed without ZeRO is predicted as DDP."
        if zero.stage == 1:
            note = (
                "ZeRO-1 is predicted as DDP, where each device holds the optimizer's whole state: "
                "it needs less memory than predicted."
            )

        return Division({"data_parallel": "ddp"}, holds=holds, widens=True, notes=(note,))

    likeness = "FSDP"
    if zero.stage == 2:
        likeness = "FSDP that keeps whole weights from the forward to the backward"
    buckets = f"; {_BUCKETS}" if zero.has_large_buckets else ""
    notes = [f"ZeRO-{zero.stage} is predicted as {likeness}{buckets}."]
    differs = zero.stage == 3 and zero.offloads_optimizer != zero.offloads_weights
    if differs and zero.offloads_optimizer:
        more = "each device holds its part of the weights in 16 bits on top of what is predicted"
        notes.append(f"Of ZeRO-3 the optimizer alone is offloaded: {more}.")
    elif differs:
        less = "it is predicted without offloading, and needs less memory than that"
        notes.append(f"Of ZeRO-3 the weights alone are offloaded: {less}.")

    knobs: dict[str, Value] = {
        "data_parallel": "fsdp",
        "reshard_after_forward": zero.stage == 3,
        "fsdp_offload": "cpu" if zero.offloads_optimizer else "none",
    }

    return Division(knobs, holds=holds, widens=True, notes=tuple(notes))


def _settings_in(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_text(path, most=_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"deepspeed: {path} cannot be read as JSON.", "Correct it.") from error

    if not isinstance(found, dict):
        raise InputError(f"deepspeed: {path} holds no settings by name.", "Correct it.")
    return found


def _of_settings(settings: Mapping[str, Any], name: str) -> Zero:
    """The same by settings of DeepSpeed; `name` is what errors call them."""
    zero = settings.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        message = f"{name}: zero_optimization must hold values by name, not {shown(zero)}."
        raise InputError(message, "Correct it.")

    stage = zero.get("stage", 0)
    if not is_whole(stage, 0) or stage > 3:
        message = f"{name}: the stage of ZeRO must be 0, 1, 2 or 3, not {shown(stage)}."
        raise InputError(message, "Correct it.")

    offloads_optimizer = _offloads(zero, "offload_optimizer", name)
    offloads_weights = _offloads(zero, "offload_param", name)
    return Zero(
        stage,
        offloads_optimizer=offloads_optimizer or zero.get("cpu_offload") is True,
        offloads_weights=offloads_weights and stage == 3,
        has_sizes=any(isinstance(settings.get(size), int) for size in _SIZES),
        has_large_buckets=_is_large(zero.get("reduce_bucket_size")),
    )


def _offloads(zero: Mapping[str, Any], section: str, name: str) -> bool:
    """Whether a section offloads to the host; `name` is what errors call the settings.

    Raises:
        InputError: it offloads elsewhere.
    """
    device = zero.get(section)
    if isinstance(device, Mapping):
        device = device.get("device")
    if device in (None, False, "none"):
        return False

    if device != "cpu":
        message = f"{name}: offloading to {shown(device)} is not predicted."
        raise InputError(message, "Offload to the CPU.")
    return True


def _is_large(bucket: Any) -> bool:
    """Whether buckets of this size take as much as DeepSpeed's own; `auto` makes them small."""
    if bucket is None:
        return True
    return isinstance(bucket, int | float) and bucket >= _LARGE


def _of_name(value: str) -> Zero | None:
    """The settings that are published under a name; None where there are none."""
    path = PurePosixPath(value)
    found = _NAME.fullmatch(path.name.removesuffix(".json").lower())
    if found is None:
        return None

    stage = int(found[1])
    words = set(re.findall("[a-z0-9]+", found[2]))
    if not words <= {*_NO_MATTER, *_OFFLOADS, "params", "optimizer", "all"}:
        return None

    offloads = not words.isdisjoint(_OFFLOADS)
    is_of_axolotl = stage == 2 and path.parent.name == _OF_AXOLOTL
    return Zero(
        stage,
        offloads_optimizer=(offloads and "params" not in words) or is_of_axolotl,
        offloads_weights=offloads and stage == 3 and "optimizer" not in words,
        has_large_buckets=stage < 3,  # "auto" in all of stage 3
    )
