"""FSDP, as files of tools on transformers' Trainer ask for it: by words such as `full_shard`, and
by keys below `fsdp_config`, with and without the prefix that they had before."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autofit.core.config import Value
from autofit.core.errors import InputError, shown
from autofit.core.files import read_text
from autofit.export import several_devices
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.tool import Request, Share, ToolKeys

Keys = Mapping[str, Any]

CONFIG = "fsdp_config"
# What FSDP does where a file lacks a key.
DEFAULTS: Mapping[str, Any] = {f"{CONFIG}.reshard_after_forward": True}
_MOST_BYTES = 2**20  # of a file
_OFFLOAD = ("offload_params", "cpu_offload")  # accelerate's name, and Trainer's
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
# Whether weights are given up after the forward. Groups of devices are machines, and there is one.
_RESHARDS = {
    "full_shard": True,
    "hybrid_shard": True,
    "shard_grad_op": False,
    "hybrid_shard_zero2": False,
}
FIRST = "FSDP 1 is predicted as FSDP 2, which needs some percent less memory."


def read_fsdp(
    keys: Keys,
    folder: Path,
    version: int,
    *,
    by_config: bool,
) -> Division | None:
    """How a file divides weights by FSDP; None where it does not.

    Args:
        folder: where the file is; that of `fsdp_config` is looked for there.
        version: of FSDP, where the file says none.
        by_config: whether `fsdp_config` switches it on, without `fsdp`.

    Raises:
        InputError: a value is not known.
    """
    asked = keys.get("fsdp")
    has_own_file = isinstance(keys.get(CONFIG), str)
    if has_own_file:
        keys = {**keys, **_of_file(folder / keys[CONFIG])}

    options = {name: value for name, value in _options(keys) if value is not None}
    is_asked = asked not in (None, False, "", [])
    if not is_asked and not (by_config and options):
        return None

    words: list[Any] = []
    if isinstance(asked, str):
        words = asked.split()
    elif isinstance(asked, list):
        words = asked

    reshards, offloads = _by_words(words)
    if "no_shard" in words:
        return Division({"data_parallel": "ddp"})

    found = keys.get("fsdp_version") or options.get("version") or version
    if found not in (1, 2, "1", "2"):
        raise InputError(f"fsdp_version must be 1 or 2, not {shown(found)}.", "Correct it.")
    if str(options.get("auto_wrap_policy")).upper() == "NO_WRAP":
        message = "auto_wrap_policy: weights that are all gathered at once are not predicted."
        raise InputError(message, "Wrap the blocks: TRANSFORMER_BASED_WRAP.")

    is_second = str(found) == "2"
    key = "reshard_after_forward"
    only_by_word = reshards is False and key not in options
    if reshards is None or (is_second and key in options):
        said = options.get(key, options.get("sharding_strategy"))
        reshards = _reshards(said)

    offload = "none"
    if offloads or any(_is_true(options.get(name)) for name in _OFFLOAD):
        offload = "cpu"

    division = Division(
        {"data_parallel": "fsdp", key: reshards, "fsdp_offload": offload},
        open=(key, "fsdp_offload"),
        widens=True,
    )
    if only_by_word or not is_second:
        division = division.closed(key)
    if offloads:
        division = division.closed("fsdp_offload")
    if has_own_file:
        division = division.closed()

    if checkpoints(keys) is not None:
        # all blocks or none; no other key of checkpointing counts
        only: dict[str, tuple[Value, ...]] = {"activation_checkpointing": ("full", "none")}
        division = replace(division, only=only, holds=("activation_offload",))

    if not is_second:
        return division.noted(FIRST)
    return division


def key_of_fsdp(keys: Keys, key: str) -> str | None:
    """What a file calls a key of FSDP, or of checkpointing where FSDP's takes its place; None: as
    the exporter does."""
    if key in _CHECKPOINTING:
        return checkpoints(keys)

    parent, _, last = key.rpartition(".")
    if parent != CONFIG:
        return None

    names = [last]
    if last in _OFFLOAD:
        names = list(_OFFLOAD)
    for name in names:
        for written in (f"{CONFIG}.{name}", f"{CONFIG}.fsdp_{name}"):
            if written in keys:
                return written

    return None


def by_trainer(section: str = "") -> Mapping[str, Share]:
    """The rows of a tool whose one file holds Trainer's arguments. Its exporter divides by a file
    for accelerate, which nobody gives to `tune`.

    Args:
        section: what the exporter's keys of that file begin with.
    """
    below = f"{section}{CONFIG}"
    return several_devices.rows(
        partial(_data_parallel, key=f"{section}fsdp"),
        reshard=partial(several_devices.reshard, path=f"{below}.reshard_after_forward"),
        offload=partial(several_devices.offload, path=f"{below}.cpu_offload"),
    )


def _data_parallel(request: Request, key: str) -> ToolKeys:
    """FSDP is one argument of Trainer; DDP is what it does with several processes."""
    keys = {}
    if several_devices.is_fsdp(request):
        keys[key] = True

    share = several_devices.by_accelerate(request, keys)
    return replace(share, as_measured=True)


def _of_file(path: Path) -> Keys:
    """The keys of a file that `fsdp_config` names."""
    try:
        found = json.loads(read_text(path, most=_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{CONFIG}: {path} cannot be read as JSON.", "Correct it.") from error

    if not isinstance(found, dict):
        raise InputError(f"{CONFIG}: {path} holds no values by name.", "Correct it.")

    return flat({CONFIG: found})


def _options(keys: Keys) -> Iterator[tuple[str, Any]]:
    """The keys below `fsdp_config`, by their names without prefix."""
    for path, value in keys.items():
        parent, _, name = path.rpartition(".")
        if parent == CONFIG:
            yield name.removeprefix("fsdp_"), value


def _by_words(words: list[Any]) -> tuple[bool | None, bool]:
    """What the words of `fsdp` say of resharding, None if nothing, and of offloading."""
    reshards = None
    offloads = False
    for word in words:
        if word in _RESHARDS:
            reshards = _RESHARDS[word]
        elif word == "offload":
            offloads = True
        elif word not in ("auto_wrap", "no_shard"):
            remedy = "It takes full_shard, shard_grad_op, offload and auto_wrap."
            raise InputError(f"fsdp: {shown(word)} is not known.", remedy)

    return reshards, offloads


def _reshards(value: Any) -> bool:
    """FSDP 1 takes the name of a strategy where FSDP 2 takes true and false."""
    name = str(value).lower()
    if value is None or name in ("true", "false"):
        return name != "false"
    if name not in _RESHARDS:
        remedy = "Write true, false, FULL_SHARD or SHARD_GRAD_OP."
        raise InputError(f"reshard_after_forward: {shown(value)} is not known.", remedy)

    return _RESHARDS[name]


def _is_true(value: Any) -> bool:
    """Whether a value is true, as YAML or as a word."""
    return str(value).lower() == "true"


def checkpoints(keys: Keys) -> str | None:
    """The key by which FSDP checkpoints blocks itself; None where it does not."""
    for name in (f"{CONFIG}.activation_checkpointing", f"{CONFIG}.fsdp_activation_checkpointing"):
        if _is_true(keys.get(name)):
            return name

    return None
