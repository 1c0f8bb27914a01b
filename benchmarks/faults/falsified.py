"""Files whose checksums are right and whose contents are not: what a reader that only counts bits would believe.

One leaf of a file's data becomes one of another type or shape, and all checksums over it are made anew, as somebody
would who wrote the file on purpose, or a program that wrote it wrongly.
"""

import json
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from autofit.core.files import checksum
from autofit.training.checkpoint_files import OWN_SUM, signed

_LINE = re.compile(r'(\{"op_code":.*),"crc":"[0-9a-f]{8}"\}')
_OTHERS: tuple[Any, ...] = (None, "text", -1, 2**70, 1.5, True, [], {}, [1, [2]], {"a": None})


def falsify(file: Path, rng: random.Random) -> None:
    """Change one leaf of a file, and the checksums over it."""
    if file.suffix == ".safetensors":
        save_file(_with_other_tensor(load_file(file), rng), file)
    elif file.suffix == ".pt":
        torch.save(_with_other_leaf(torch.load(file, weights_only=True), rng), file)
    elif file.name == "journal.log":
        _falsify_journal(file, rng)
    elif file.suffix == ".json":
        _rewrite(file, json.loads, json.dumps, rng)
    elif file.suffix == ".yaml":
        _rewrite(file, yaml.safe_load, yaml.safe_dump, rng)
    else:
        file.write_bytes(b"")
    _sign_again(file)


def _rewrite(
    file: Path, read: Callable[[str], Any], write: Callable[[Any], str], rng: random.Random
) -> None:
    text = file.read_text(encoding="utf-8")
    body = text[: text.rfind(OWN_SUM)] if OWN_SUM in text else text
    file.write_text(write(_with_other_leaf(read(body), rng)), encoding="utf-8")


def _falsify_journal(file: Path, rng: random.Random) -> None:
    """One of the records."""
    lines = file.read_text(encoding="utf-8").split("\n")
    places = [place for place, line in enumerate(lines) if _LINE.fullmatch(line)]
    if not places:
        return
    place = rng.choice(places)
    match = _LINE.fullmatch(lines[place])
    assert match is not None
    record = _with_other_leaf(json.loads(match[1] + "}"), rng)
    text = json.dumps(record, separators=(",", ":"))[:-1] if isinstance(record, dict) else match[1]
    lines[place] = f'{text},"crc":"{zlib.crc32(text.encode()):08x}"}}'
    file.write_text("\n".join(lines), encoding="utf-8")


def _sign_again(file: Path) -> None:
    """The checksums of a checkpoint, where the file belongs to one."""
    label = file.parent / "checkpoint.yaml"
    if not label.exists():
        return
    text = label.read_text(encoding="utf-8")
    known = yaml.safe_load(text)
    if isinstance(known, dict):
        known.pop(OWN_SUM, None)
        if isinstance(known.get("crc32"), dict) and file.name in known["crc32"]:
            known["crc32"][file.name] = checksum(file)
        text = yaml.safe_dump(known)
    label.write_text(signed(text), encoding="utf-8")


def _with_other_tensor(
    tensors: dict[str, torch.Tensor], rng: random.Random
) -> dict[str, torch.Tensor]:
    if not tensors:
        return {"extra": torch.zeros(3)}
    name = rng.choice(sorted(tensors))
    if rng.random() < 0.2:
        return {key: each for key, each in tensors.items() if key != name}
    return {**tensors, name: _other(tensors[name], rng)}


def _with_other_leaf(data: Any, rng: random.Random) -> Any:
    """The data with one part of it, at any depth, replaced or left out."""
    if isinstance(data, dict) and data and rng.random() < 0.85:
        key = rng.choice(sorted(data, key=str))
        if rng.random() < 0.15:
            return {name: each for name, each in data.items() if name != key}
        return {**data, key: _with_other_leaf(data[key], rng)}
    if isinstance(data, list | tuple) and data and rng.random() < 0.85:
        place = rng.randrange(len(data))
        parts = [*data[:place], _with_other_leaf(data[place], rng), *data[place + 1 :]]
        return tuple(parts) if isinstance(data, tuple) else parts
    return _other(data, rng)


def _other(value: Any, rng: random.Random) -> Any:
    """Something of another type or shape."""
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        shape = rng.choice([(), (1,), (3,), (2, 5), (*value.shape, 2), value.shape[1:]])
        dtype = rng.choice([value.dtype, torch.int64, torch.float64, torch.uint8])
        if tuple(shape) != tuple(value.shape) or dtype != value.dtype:
            return torch.ones(shape, dtype=dtype)
        return torch.ones((*shape, 2), dtype=dtype)
    others = [each for each in _OTHERS if type(each) is not type(value)]
    return (
        torch.zeros(3, dtype=torch.int64) if isinstance(value, torch.Tensor) else rng.choice(others)
    )
