"""The files of one checkpoint: how they are named, written, checked and read.

A checkpoint is a directory `checkpoints/step-00000200/`:

- trained weights and buffers, as safetensors
- the state of scaler, random numbers and data, as JSON
- the state of the optimizer, read with `weights_only=True`: libraries have tensors of their own
- `checkpoint.yaml`, the label, which names the run and holds the checksums of all files. Its own
  checksum is its last line.

Nothing that is read can run code. Of several ranks, each writes its parts of the weights and of the
optimizer's state (`sharded_state`) and its random numbers. Any number of ranks reads either.
"""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autofit.core import strict_yaml
from autofit.core.errors import InputError, describe_error
from autofit.core.files import checksum
from autofit.distributed import Ranks
from autofit.training import atomic_writes, json_state, sharded_state
from autofit.training.checkpoint_schema import STATE_FIELDS, DamagedError, check_label
from autofit.training.host_tensors import Tensors

FOLDER = "checkpoints"
LABEL = "checkpoint.yaml"
WEIGHTS = "weights.safetensors"
BUFFERS = "buffers.safetensors"
FORMAT = 3
OWN_SUM = "label_crc32"
PARTS = "parts"  # in what was read: the tensors of which each rank wrote a part

Label = dict[str, Any]  # as checkpoint.yaml has it
Contents = dict[str, Any]  # of the files of a checkpoint, by their names or those of their fields

_STEP = re.compile(r"step-(\d{8,})")


def state_file(rank: int) -> str:
    """The name of the file of a rank's state."""
    return f"state{_suffix(rank)}.json"


def optimizer_file(rank: int) -> str:
    """The name of the file of a rank's optimizer."""
    return f"optimizer{_suffix(rank)}.pt"


def _suffix(rank: int) -> str:
    """What the names of a rank's files have; nothing for the first."""
    return f"-{rank}" if rank else ""


def step_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / FOLDER / f"step-{step:08d}"


def steps(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints of an output directory by their steps, the newest first."""
    found = []

    for name, path in atomic_writes.complete_entries(directory / FOLDER):
        match = _STEP.fullmatch(name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def write(files: Contents, folder: Path) -> list[Path]:
    """Write each content as its kind is written, and return the files."""
    written = []

    for name, content in files.items():
        path = folder / name
        written.append(path)
        if path.suffix == ".safetensors":
            safetensors.torch.save_file(content, path)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            # Given a path, torch would hide why the system failed.
            with path.open("wb") as file:
                torch.save(content, file)
    return written


def write_label(label: Label, folder: Path) -> None:
    """Write the label, which ends a checkpoint."""
    (folder / LABEL).write_text(signed(strict_yaml.dump(label)), encoding="utf-8")


def signed(text: str) -> str:
    """A label with its own checksum."""
    return f"{text}{OWN_SUM}: {zlib.crc32(text.encode())}\n"


def read_label(path: Path) -> Label:
    """The label of a checkpoint.

    Raises DamagedError for what no training wrote, InputError for the format of another autofit.
    """
    file = path / LABEL
    try:
        label = strict_yaml.load_mapping(file)
    except InputError as error:
        raise DamagedError(f"{LABEL} cannot be read") from error
    check_label(label)

    version = label["autofit_checkpoint"]
    is_older = version < FORMAT and OWN_SUM not in label
    if not is_older:
        text = file.read_text(encoding="utf-8")
        if text != signed(text[: text.rfind(OWN_SUM)]):
            raise DamagedError(f"{LABEL} is not what was written")

    if version != FORMAT:
        raise InputError(
            f"the checkpoint {path} is of format {version}, this autofit reads {FORMAT}.",
            "Resume it with the autofit that wrote it.",
        )
    return label


def read_contents(path: Path, label: Label, ranks: Ranks) -> Contents:
    """The contents of every other file: fields of the state, "optimizer", WEIGHTS and BUFFERS.

    All files are checked before anything is used; several ranks share those that none of them
    reads. What several ranks wrote is in PARTS, on meta, and so are WEIGHTS then.

    State goes to the host: each optimizer knows best what of it belongs on the device, and an
    offloaded one none. Tensors of a library's own class (torchao's) pass `weights_only`: that
    library, loaded with the optimizer, has registered them as safe.

    Raises DamagedError.
    """
    checksums = label["crc32"]
    rank = ranks.rank % label.get("ranks", 1)
    state = state_file(rank)
    optimizer = optimizer_file(rank)
    readers: dict[str, Callable[[Path], Any]] = {
        WEIGHTS: safetensors.torch.load_file,
        BUFFERS: safetensors.torch.load_file,
        state: _read_state,
        optimizer: _read_optimizer,
    }

    contents: Contents = {}
    for number, name in enumerate(sorted({*checksums, BUFFERS, state})):
        is_read = name in readers
        if not is_read and number % ranks.layout.world != ranks.rank:
            continue  # another rank checks it

        _check_sum(path / name, checksums.get(name))
        if not is_read:
            continue
        try:
            contents[name] = readers[name](path / name)
        # torch raises whatever it stumbles over, with pages of advice
        except Exception as error:
            raise DamagedError(f"{name} cannot be read ({type(error).__name__})") from error

    contents |= contents.pop(state)
    if optimizer in contents:
        contents["optimizer"] = contents.pop(optimizer)
    if WEIGHTS not in checksums:
        contents[PARTS] = _described_parts(path, checksums)
        contents[WEIGHTS] = dict(contents[PARTS])
        for buffer in contents[BUFFERS]:
            contents[WEIGHTS].pop(buffer, None)
    return contents


def _check_sum(file: Path, written: int | None) -> None:
    """Raise a DamagedError for a file that is not there, or not what was written."""
    try:
        found = checksum(file)
    except OSError as error:
        raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from error

    if found != written:
        raise DamagedError(f"{file.name} is not what was written")


def _read_state(file: Path) -> dict[str, Any]:
    """The fields that belong to a state, of those in the file."""
    found = json_state.loads(file.read_text(encoding="utf-8"))
    return {key: found[key] for key in STATE_FIELDS & found.keys()}


def _read_optimizer(file: Path) -> Any:
    """The state of an optimizer, on the host."""
    return torch.load(file, map_location="cpu", weights_only=True)


def _described_parts(path: Path, checksums: dict[str, int]) -> Tensors:
    """The tensors that several ranks wrote, on meta. Raises DamagedError."""
    try:
        return sharded_state.described(path, checksums.keys())
    except Exception as error:  # also of torch's reader
        raise DamagedError(f"its tensors cannot be read ({describe_error(error)})") from error
